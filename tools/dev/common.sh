# Shared by every ./dev command: messages, the number of jobs, Debian packages, where LibTorch comes from.
# shellcheck shell=bash

FSDP_PRESET="${FSDP_PRESET:-release}"
export BUILD_DIR="build/$FSDP_PRESET"

say() { printf '==> %s\n' "$*"; }
warn() { printf 'warning: %s\n' "$*" >&2; }
die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

# One compilation of torch code takes up to 3 GB, so memory bounds the jobs as well as processors do.
num_jobs() {
  local by_memory num_processors
  num_processors="$(nproc 2>/dev/null || echo 2)"
  by_memory="$(awk '/MemAvailable/ { print int($2 / 1024 / 1024 / 3) }' /proc/meminfo 2>/dev/null || echo 2)"
  local jobs=$((num_processors < by_memory ? num_processors : by_memory))
  echo "${FSDP_JOBS:-$((jobs > 0 ? jobs : 1))}"
}

have() { command -v "$1" >/dev/null 2>&1; }

missing_packages() {
  local package
  for package in "$@"; do
    [[ "$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null)" == "install ok installed" ]] || echo "$package"
  done
}

# Installs Debian packages. Returns 1, having said what is needed, where that is not possible.
install_packages() {
  if ! have apt-get || ! have dpkg-query; then
    warn "no apt here; what is needed, by Debian names: $*"
    return 1
  fi
  local missing
  mapfile -t missing < <(missing_packages "$@")
  [[ ${#missing[@]} -gt 0 ]] || return 0

  local as_root=()
  if [[ "$(id -u)" != 0 ]]; then
    if ! have sudo; then
      warn "neither root nor sudo; install these packages: ${missing[*]}"
      return 1
    fi
    as_root=(sudo)
  fi
  say "installing ${#missing[@]} Debian packages: ${missing[*]}"
  local apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0)
  local log
  log="$(mktemp)"
  if ! { "${apt[@]}" update && "${apt[@]}" install -y --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 </dev/null; then
    tail -n 15 "$log" >&2
    rm -f "$log"
    warn "apt-get failed (its last lines are above); still missing: ${missing[*]}"
    return 1
  fi
  rm -f "$log"
}

# The user's own LibTorch, when FSDP_LIBTORCH or CMAKE_PREFIX_PATH holds one.
user_libtorch() {
  local prefix prefixes
  if [[ -n "${FSDP_LIBTORCH:-}" ]]; then
    [[ -f "$FSDP_LIBTORCH/share/cmake/Torch/TorchConfig.cmake" ]] ||
      die "FSDP_LIBTORCH=$FSDP_LIBTORCH holds no share/cmake/Torch/TorchConfig.cmake"
    echo "$FSDP_LIBTORCH"
    return
  fi
  IFS=: read -ra prefixes <<<"${CMAKE_PREFIX_PATH:-}"
  for prefix in "${prefixes[@]}"; do
    if [[ -f "$prefix/share/cmake/Torch/TorchConfig.cmake" ]]; then
      echo "$prefix"
      return
    fi
  done
}

# Every time: it takes seconds, and picks up another LibTorch or changed presets.
configure() {
  mkdir -p build
  say "configuring build/$1"
  cmake --preset "$@" >"build/.configure.log" 2>&1 </dev/null && return
  cat build/.configure.log >&2
  die "CMake could not configure build/$1; the reason is above"
}

# Seconds a stage took, so that slow ones are seen.
stage() {
  local name="$1" start=$SECONDS
  shift
  "$@"
  say "$name took $((SECONDS - start)) s"
}
