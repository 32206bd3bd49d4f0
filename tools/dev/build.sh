# ./dev build [targets]
# shellcheck shell=bash
source tools/dev/setup.sh

cmd_build() {
  cmd_setup
  build_targets "$@"
}

build_targets() {
  configure "$FSDP_PRESET"
  local jobs
  jobs="$(num_jobs)"
  say "building $BUILD_DIR with $jobs jobs"
  ninja -C "$BUILD_DIR" -j "$jobs" "$@" || die "the build failed; the first error is above"
}
