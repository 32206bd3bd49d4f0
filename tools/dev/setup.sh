# ./dev setup: Debian packages, then LibTorch in .venv (or the user's own).
# shellcheck shell=bash

TORCH_VERSION=2.13.0 # docs/dependencies.md says why this one
PACKAGES=(g++ cmake ninja-build ccache mold libgloo-dev libgtest-dev libgmock-dev libcli11-dev)

cmd_setup() {
  local libtorch packages=("${PACKAGES[@]}")
  libtorch="$(user_libtorch)"
  [[ -n "$libtorch" ]] || packages+=(python3-venv)
  install_packages "${packages[@]}" || say "going on with what is installed"
  require_tools
  if [[ -n "$libtorch" ]]; then
    say "LibTorch: yours, in $libtorch"
  else
    make_venv
  fi
}

require_tools() {
  local tool
  for tool in cmake ninja; do
    have "$tool" || die "$tool is not installed (Debian package ${tool/ninja/ninja-build})"
  done
  have c++ || have g++ || have clang++ || die "no C++ compiler (Debian package g++, 12 or newer)"
  local found
  found="$(cmake --version | awk 'NR == 1 { print $3 }')"
  [[ "$(printf '3.25\n%s\n' "$found" | sort -V | head -n 1)" == 3.25 ]] || die "CMake $found is too old: 3.25 is needed"
}

# Python is how LibTorch is fetched and what the parity tests compare with; nothing of it runs in a program.
make_venv() {
  local python=.venv/bin/python
  if [[ "$(torch_in_venv)" != "$TORCH_VERSION"* ]]; then
    say "making .venv with torch==$TORCH_VERSION"
    if [[ ! -x $python ]]; then
      have python3 || die "python3 is needed to fetch LibTorch; or point FSDP_LIBTORCH at a LibTorch $TORCH_VERSION"
      rm -rf .venv
      new_venv
    fi
    $python -m pip install --quiet --disable-pip-version-check "torch==$TORCH_VERSION" numpy </dev/null ||
      die "pip could not install torch==$TORCH_VERSION; or point FSDP_LIBTORCH at your own LibTorch $TORCH_VERSION"
  fi
  report_torch
}

# The first python3 on the PATH may lack venv while Debian's own has it.
new_venv() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    "$candidate" -m venv .venv >/dev/null 2>&1 && return
    rm -rf .venv
  done
  die "python3 -m venv fails (Debian package python3-venv)"
}

# Empty when there is none. Reads the file: importing torch takes seconds.
torch_in_venv() {
  sed -n "s/^__version__ = '\(.*\)'/\1/p" .venv/lib/python3*/site-packages/torch/version.py 2>/dev/null || true
}

report_torch() {
  local version folder
  folder="$(echo .venv/lib/python3*/site-packages/torch)"
  version="$(torch_in_venv)"
  [[ -n "$version" ]] || die "no torch in .venv after the installation"
  say "LibTorch: $version in .venv, $(du -sm "$folder" | cut -f1) MB"
  if ! grep -q '^cuda.*= None' "$folder/version.py"; then
    warn "this is a CUDA build, larger than the CPU build that the tests need; both work"
  fi
}
