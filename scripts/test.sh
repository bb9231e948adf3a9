#!/usr/bin/env bash
# Runs the tests. Needs Python 3.12 or newer and no GPU; arguments go to pytest, and "-m long" runs the long ones instead.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_environment
setup_transformer_engine
# torch looks up the names of hosts when it connects ranks. If no name server answers, this takes 5 s by default.
export RES_OPTIONS="timeout:1"
# Hundreds of processes import the package and the tests: without stored byte code each compiles them.
unset PYTHONDONTWRITEBYTECODE
# Two at a time: most of a test is processes that start and wait. A file stays together, with its workers.
exec .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not long" "$@"
