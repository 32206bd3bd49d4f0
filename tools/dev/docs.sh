# ./dev docs: links between documents, and the comment on top of every header.
# shellcheck shell=bash

cmd_docs() {
  have python3 || die "python3 is needed"
  python3 tools/check_docs.py
}
