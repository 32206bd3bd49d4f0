#!/usr/bin/env bash
# A separate project builds against the installed library and runs; it configures against the build tree as well.
# shellcheck source=tests/install/common.sh
source "$(dirname "$0")/common.sh"

"$CMAKE" --install "$FSDP_BUILD" --prefix "$WORK/prefix" --component fsdp >"$WORK/install.log"
must_configure installed "$HERE/consumer" -DCMAKE_PREFIX_PATH="$WORK/prefix"
must_build installed
output="$("$WORK/installed/consumer")"
[[ "$output" == "trained sharded over 1 rank" ]] || fail "the consumer printed '$output'"

must_configure build_tree "$HERE/consumer" -Dfsdp_DIR="$FSDP_BUILD"
