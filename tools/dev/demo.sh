# ./dev demo [train options]: a GPT learns the text that every Debian has, over 2 processes.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_demo() {
  cmd_build fsdp_cli
  run_demo "$@"
}

run_demo() {
  local fsdp="$BUILD_DIR/apps/fsdp/fsdp"
  "$fsdp" run --nproc-per-node 2 -- "$fsdp" train "$@"
}
