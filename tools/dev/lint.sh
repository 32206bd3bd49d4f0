# ./dev lint [--all]: clang-tidy on the C++ files changed since origin/main (or the last commit), shellcheck on scripts.
# shellcheck shell=bash
source tools/dev/build.sh
source tools/dev/format.sh

cmd_lint() {
  local all=no
  case "${1:-}" in
    "") ;;
    --all) all=yes ;;
    *) die "lint takes --all or nothing, not '$1'" ;;
  esac
  lint_scripts
  lint_cxx "$all"
}

lint_scripts() {
  local scripts
  mapfile -t scripts < <(find dev .ci tools benchmarks examples tests -type f \( -name '*.sh' -o -path dev -o -path .ci/run \))
  say "bash -n on ${#scripts[@]} scripts"
  local script
  for script in "${scripts[@]}"; do
    bash -n "$script" || die "$script does not parse"
  done
  have shellcheck || install_packages shellcheck || return 0
  say "shellcheck on ${#scripts[@]} scripts"
  shellcheck -x "${scripts[@]}" || die "shellcheck found something"
}

# Files changed against where this branch left origin/main, or against the last commit, and what is not committed yet.
changed_cxx_files() {
  local base
  base="$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse --verify -q HEAD~1 || git rev-parse HEAD)"
  {
    git diff --name-only --diff-filter=d "$base"
    git ls-files --others --exclude-standard
  } | grep -E '\.(cpp|h)$' | sort -u || true
}

# clang-tidy checks translation units; a changed header is checked through the .cpp files that say its name.
translation_units() {
  local file
  while read -r file; do
    case "$file" in
      *.cpp) echo "$file" ;;
      *.h) grep -rlE "#include [<\"](.*/)?$(basename "$file")[>\"]" --include='*.cpp' "${CXX_FOLDERS[@]}" 2>/dev/null || true ;;
    esac
  done | sort -u
}

lint_cxx() {
  local files
  if [[ $1 == yes ]]; then
    mapfile -t files < <(cxx_files | grep '\.cpp$')
  else
    git rev-parse --git-dir >/dev/null 2>&1 || die "not a git checkout: use ./dev lint --all"
    mapfile -t files < <(changed_cxx_files | translation_units)
  fi
  if [[ ${#files[@]} -eq 0 ]]; then
    say "no C++ file changed; nothing for clang-tidy (--all checks everything)"
    return
  fi
  have clang-tidy-19 || install_packages clang-tidy-19 || have clang-tidy || die "clang-tidy is not installed"
  cmd_setup
  configure lint
  local units
  mapfile -t units < <(python3 tools/lint_units.py build/lint "${files[@]}")
  [[ ${#units[@]} -gt 0 ]] || return 0
  say "clang-tidy on ${#files[@]} files in ${#units[@]} units; reading LibTorch's headers takes minutes for each"
  printf '%s\0' "${units[@]}" |
    xargs -0 -n 1 -P "$(num_jobs)" "$(command -v clang-tidy-19 || command -v clang-tidy)" --quiet -p build/lint/units \
      --line-filter="$(line_filter "${files[@]}")" --extra-arg-before=-include \
      --extra-arg-before="$PWD/cmake/pch.h" || die "clang-tidy found something"
}

# Reports only what is in the files asked for and in the project's headers.
line_filter() {
  local file names=()
  for file in "$@"; do names+=("{\"name\":\"$file\"}"); done
  local IFS=,
  echo "[${names[*]},{\"name\":\".h\"}]"
}
