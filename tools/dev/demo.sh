# ./dev demo [train options]: a GPT learns the text that every Debian has, over 2 processes.
# ./dev demo long: the lessons about other ways of training at full size, a sequence of 65,536 tokens among them.
# shellcheck shell=bash
source tools/dev/build.sh

DEMO_TEXT=/usr/share/common-licenses # 250 kB of English on every Debian

# Adds "--option value" to `options` unless the caller's own arguments name that option.
add_default() {
  local option="$1" value="$2" argument
  shift 2
  for argument in "$@"; do
    [[ $argument == "$option" || $argument == "$option="* ]] && return
  done
  options+=("$option" "$value")
}

# Starts lesson NAME over 2 processes: lesson NAME [options].
lesson() {
  local name="$1"
  shift
  say "$name $*"
  OMP_NUM_THREADS=1 "$BUILD_DIR/apps/fsdp/fsdp" run --nproc-per-node 2 -- "$BUILD_DIR/examples/$name" "$@" |
    sed -u 's/^\[default0\]://'
}

demo_long() {
  cmd_build fsdp_app 05_ddp 06_long_sequence
  say "three lessons at full size; about 15 minutes on two processors"
  lesson 05_ddp --steps 100 --dim 2048
  local sizes=(--seq-len 65536 --dim 256 --depth 1 --steps 1)
  lesson 06_long_sequence --method ulysses "${sizes[@]}"
  lesson 06_long_sequence --method ring "${sizes[@]}"
}

cmd_demo() {
  if [[ ${1:-} == long ]]; then
    [[ $# -eq 1 ]] || die "demo long takes no options"
    demo_long
    return
  fi
  local options=()
  add_default --data "$DEMO_TEXT" "$@"
  add_default --num-threads 1 "$@"
  # Sizes that learn most in the two minutes that two processors have; a slower machine is held to them by the limit.
  add_default --dim 96 "$@"
  add_default --num-layers 3 "$@"
  add_default --seq-len 64 "$@"
  add_default --batch-size 16 "$@"
  add_default --steps 1500 "$@"
  add_default --log-interval 100 "$@"
  add_default --time-limit 120 "$@"
  [[ " ${options[*]} " != *" $DEMO_TEXT "* || -d $DEMO_TEXT ]] ||
    die "$DEMO_TEXT is missing here: name a text file or folder with --data"
  cmd_build fsdp_app
  local fsdp="$BUILD_DIR/apps/fsdp/fsdp"
  say "training over 2 processes; it ends with the validation loss, after at most 3 minutes"
  # One rank speaks, so its prefix says nothing.
  "$fsdp" run --nproc-per-node 2 -- "$fsdp" train "${options[@]}" "$@" | sed -u 's/^\[default0\]://'
}
