# ./dev bench [--json FILE]: prints step times, ratios and the cost of interception.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_bench() {
  [[ -f benchmarks/run.sh ]] || die "benchmarks/run.sh is missing"
  cmd_setup
  build_targets
  bash benchmarks/run.sh "$@"
}
