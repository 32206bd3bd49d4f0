# ./dev test [ctest args]: everything that is checked on every change.
# shellcheck shell=bash
source tools/dev/build.sh

cmd_test() {
  stage "setup" cmd_setup
  stage "build" build_targets
  say "testing"
  # Tests have their own limits; --timeout is for those without one. ctest's summary stays the last thing printed.
  ctest --test-dir "$BUILD_DIR" --output-on-failure --no-tests=error --timeout 600 "$@" </dev/null
}
