#!/usr/bin/env bash
# Prints step times, their ratios and the cost of interception; --json FILE writes the same as a list of
# {"name", "config", "value", "unit"}. Needs a build (BUILD_DIR, default build/release); see run.py --help.
set -euo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
[[ -x "$python" ]] || python=python3
exec "$python" benchmarks/run.py --build-dir "${BUILD_DIR:-build/release}" "$@"
