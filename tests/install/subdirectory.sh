#!/usr/bin/env bash
# A project that adds the sources with add_subdirectory sees the headers, LibTorch and its own settings. Only the
# project's own file is compiled: that the library links is shown by the other tests.
# shellcheck source=tests/install/common.sh
source "$(dirname "$0")/common.sh"

arguments=(-DFSDP_SOURCE="$FSDP_SOURCE" -DTorch_DIR="$TORCH_DIR")
must_configure torch_after "$HERE/subdirectory" "${arguments[@]}"
must_build torch_after --target consumer_objects
must_configure torch_before "$HERE/subdirectory" "${arguments[@]}" -DTORCH_FIRST=ON
must_configure shared_library "$HERE/subdirectory" "${arguments[@]}" -DBUILD_SHARED_LIBS=ON

for target in test_comm fsdp_app; do
  "$CMAKE" --build "$WORK/torch_after" --target help | grep -q "^$target:" &&
    fail "$target is built for a project that only adds the library"
done
exit 0
