# Shared by the tests of this folder. FSDP_SOURCE, FSDP_BUILD, TORCH_DIR, CMAKE and CXX come from ctest.
# shellcheck shell=bash
set -euo pipefail

export HERE="$FSDP_SOURCE/tests/install"
WORK="$FSDP_BUILD/install-test/$(basename "$0" .sh)"
rm -rf "$WORK"
mkdir -p "$WORK"

fail() {
  printf 'FAILED: %s\n' "$*" >&2
  exit 1
}

# configure NAME SOURCE [cmake args]: into $WORK/NAME, everything said into $WORK/NAME.log.
configure() {
  local name="$1" source="$2"
  shift 2
  "$CMAKE" -G Ninja -S "$source" -B "$WORK/$name" "$@" >"$WORK/$name.log" 2>&1
}

must_configure() {
  configure "$@" && return
  cat "$WORK/$1.log" >&2
  fail "the project '$1' does not configure"
}

# must_refuse TEXT NAME SOURCE [cmake args]: configuring fails and says TEXT (CMake wraps lines, so blanks are folded).
must_refuse() {
  local text="$1"
  shift
  if configure "$@"; then
    fail "the project '$1' configures, but '$text' was expected"
  fi
  tr -s ' \n' ' ' <"$WORK/$1.log" | grep -qF "$text" && return
  cat "$WORK/$1.log" >&2
  fail "the project '$1' is refused, but not with '$text'"
}

must_build() {
  local name="$1"
  shift
  "$CMAKE" --build "$WORK/$name" "$@" >"$WORK/$name.build.log" 2>&1 && return
  tail -n 40 "$WORK/$name.build.log" >&2
  fail "the project '$name' does not build"
}
