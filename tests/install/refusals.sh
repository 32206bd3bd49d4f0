#!/usr/bin/env bash
# A LibTorch of another version, none at all, and the old C++ ABI are refused with one clear line each, by the library's
# own build and by the installed package.
# shellcheck source=tests/install/common.sh
source "$(dirname "$0")/common.sh"

old_abi="this project asks for the old C++ ABI (_GLIBCXX_USE_CXX11_ABI=0), but LibTorch and fsdp use the new one"
other_version="LibTorch 2.13 is supported, but LibTorch 2.99.1 was found in $HERE/fake_libtorch"
none="LibTorch 2.13 is needed and none was found"

for project in "$FSDP_SOURCE" "$HERE/consumer"; do
  name="$(basename "$project")"
  arguments=(-Dfsdp_DIR="$FSDP_BUILD")
  must_refuse "$other_version" "$name-version" "$project" "${arguments[@]}" -DTorch_DIR="$HERE/fake_libtorch"
  must_refuse "$none" "$name-none" "$project" "${arguments[@]}" -DCMAKE_DISABLE_FIND_PACKAGE_Torch=ON
  must_refuse "$old_abi" "$name-abi" "$project" "${arguments[@]}" -DTorch_DIR="$TORCH_DIR" \
    -DCMAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0
done
must_refuse "$old_abi" definition "$HERE/consumer" -Dfsdp_DIR="$FSDP_BUILD" -DTorch_DIR="$TORCH_DIR" \
  -DCONSUMER_DEFINITION=_GLIBCXX_USE_CXX11_ABI=0
must_refuse "was built with the old C++ ABI" libtorch-abi "$HERE/consumer" -Dfsdp_DIR="$FSDP_BUILD" \
  -DTorch_DIR="$HERE/fake_libtorch" -DFAKE_VERSION=2.13.0 -DFAKE_CXX_FLAGS=-D_GLIBCXX_USE_CXX11_ABI=0

# Without CMake the header says it.
torch="$TORCH_DIR/../../.."
if "$CXX" -std=c++20 -fsyntax-only -D_GLIBCXX_USE_CXX11_ABI=0 -I"$FSDP_SOURCE/include" -I"$torch/include" -x c++ - \
  <<<'#include <fsdp/version.h>' 2>"$WORK/header.log"; then
  fail "fsdp/version.h compiles with the old C++ ABI"
fi
[[ "$(grep -c 'error:' "$WORK/header.log")" == 1 ]] || fail "not one line: $(cat "$WORK/header.log")"
grep -q 'compiled with the old C++ ABI' "$WORK/header.log" || fail "the header says: $(cat "$WORK/header.log")"
