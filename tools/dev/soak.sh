# ./dev soak [--minutes N] [--seed N]: random nets, wrappings and calls against one process, 30 minutes by default.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_soak() {
  local minutes=30 seed=1
  while [[ $# -gt 0 ]]; do
    case "$1" in
      --minutes) minutes="${2:-}" ;;
      --seed) seed="${2:-}" ;;
      *) die "soak takes --minutes N and --seed N, not '$1'" ;;
    esac
    [[ ${2:-} =~ ^[0-9]+$ ]] || die "$1 wants a number, not '${2:-}'"
    shift 2
  done
  build_targets test_soak
  say "random scenarios for $minutes minutes from seed $seed; a failure names its seed"
  OMP_NUM_THREADS=1 FSDP_SOAK_MINUTES="$minutes" FSDP_SOAK_SEED="$seed" "$BUILD_DIR/tests/test_soak" --gtest_brief=1
}
