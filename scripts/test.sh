#!/usr/bin/env bash
# Runs all tests. Needs Python 3.12 or newer and no GPU; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_environment
exec .venv/bin/python -m pytest "$@"
