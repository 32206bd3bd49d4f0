#!/usr/bin/env bash
# Every public header compiles alone, and none brings gloo, NCCL or CUDA headers to its users.
# shellcheck source=tests/install/common.sh
source "$(dirname "$0")/common.sh"

if grep -nEi '#include *[<"][^>"]*(gloo|nccl|cuda|hccl|mpi)' "$FSDP_SOURCE"/include/fsdp/*.h; then
  fail "the public headers above include headers of a backend"
fi
for header in "$FSDP_SOURCE"/include/fsdp/*.h; do
  name="$(basename "$header")"
  [[ $name == fsdp.h ]] || grep -q "#include <fsdp/$name>" "$FSDP_SOURCE/include/fsdp/fsdp.h" || fail "fsdp.h lacks $name"
done
"$CMAKE" --build "$FSDP_BUILD" --target fsdp_public_headers -j 2 >"$WORK/build.log" 2>&1 || {
  tail -n 40 "$WORK/build.log" >&2
  fail "a public header does not compile alone"
}
