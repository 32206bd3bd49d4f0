# ./dev format [--check]: clang-format on every C++ file.
# shellcheck shell=bash

CXX_FOLDERS=(include src apps examples tests benchmarks)

cxx_files() {
  local folder existing=()
  for folder in "${CXX_FOLDERS[@]}"; do
    [[ -d $folder ]] && existing+=("$folder")
  done
  find "${existing[@]}" \( -name '*.cpp' -o -name '*.h' \) | sort
}

# Releases of clang-format disagree, so it is Debian 12's that counts.
clang_format() {
  if have clang-format-14; then
    clang-format-14 "$@"
  else
    clang-format "$@"
  fi
}

cmd_format() {
  have clang-format-14 || have clang-format || install_packages clang-format || true
  have clang-format-14 || have clang-format || die "clang-format is not installed (Debian package clang-format)"
  local files
  mapfile -t files < <(cxx_files)
  case "${1:-}" in
    "")
      say "formatting ${#files[@]} files"
      clang_format -i "${files[@]}"
      ;;
    --check)
      say "checking the format of ${#files[@]} files"
      clang_format --dry-run -Werror "${files[@]}" || die "run ./dev format"
      ;;
    *) die "format takes --check or nothing, not '$1'" ;;
  esac
}
