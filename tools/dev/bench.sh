# ./dev bench [--json FILE]: prints step times, ratios and the cost of interception.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_bench() {
  cmd_setup
  build_targets
  bash benchmarks/run.sh "$@"
}
