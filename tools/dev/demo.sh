# ./dev demo [train options]: a GPT learns the text that every Debian has, over 2 processes.
# shellcheck shell=bash
source tools/dev/build.sh

DEMO_TEXT=/usr/share/common-licenses # 250 kB of English on every Debian

cmd_demo() {
  local data=(--data "$DEMO_TEXT") argument
  for argument in "$@"; do
    [[ $argument == --data || $argument == --data=* ]] && data=()
  done
  [[ ${#data[@]} -eq 0 || -d $DEMO_TEXT ]] || die "$DEMO_TEXT is missing here: name a text file or folder with --data"
  cmd_build fsdp_app
  local fsdp="$BUILD_DIR/apps/fsdp/fsdp"
  say "training over 2 processes; it ends with the validation loss, after at most 3 minutes"
  "$fsdp" run --nproc-per-node 2 -- "$fsdp" train "${data[@]}" --num-threads 1 --time-limit 150 "$@"
}
