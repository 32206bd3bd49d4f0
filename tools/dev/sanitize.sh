# ./dev sanitize [address|undefined|thread]: unit tests under a sanitizer. LibTorch itself is not instrumented, so what
# passes through it is not seen; what this project's own code does is.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_sanitize() {
  local preset layers filter='*'
  case "${1:-address}" in
    address) preset=asan layers=(comm mesh dtensor sharding parallel attention) ;;
    undefined) preset=ubsan layers=(comm mesh dtensor sharding parallel attention) ;;
    thread) preset=tsan layers=(comm sharding) ;;
    *) die "sanitize takes address, undefined or thread, not '$1'" ;;
  esac
  cmd_setup
  FSDP_PRESET="$preset"
  BUILD_DIR="build/$preset"
  build_targets "${layers[@]/#/test_}"
  # Leaks: LibTorch keeps its registries until the process ends.
  export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
  export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1:${UBSAN_OPTIONS:-}"
  export TSAN_OPTIONS="suppressions=$PWD/tools/dev/tsan.supp:ignore_noninstrumented_modules=1:${TSAN_OPTIONS:-}"
  local layer
  for layer in "${layers[@]}"; do
    [[ $preset == tsan && $layer == sharding ]] && filter='*Schedule*'
    say "tests/$layer under the $preset preset"
    "$BUILD_DIR/tests/test_$layer" --gtest_filter="$filter" --gtest_brief=1 </dev/null ||
      die "tests/$layer failed under the $preset preset"
  done
}
