#!/usr/bin/env bash
# A new user's path, timed: a fresh clone of this repository, the README's commands, a first comparison and a run of their
# own. Needs Python 3.12 or newer and no GPU. With --shared-environment the clone uses this repository's .venv (or the
# environment of $PYTHON), so that the download of torch and Megatron is not in the time.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
place=$(mktemp -d)
started=$SECONDS
step() {
    local from=$SECONDS
    printf '\n== %s\n' "$*"
    "$@"
    printf '== %d s\n' $((SECONDS - from))
}
step git clone --quiet "$root" "$place/megatron_overlap"
cd "$place/megatron_overlap"
if [ "${1:-}" = --shared-environment ]; then
    packages=$("${PYTHON:-$root/.venv/bin/python}" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "${PYTHON:-$root/.venv/bin/python}" -m venv .venv
    own=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    printf '%s\n%s\n' "$PWD" "$packages" > "$own/shared.pth"
    printf '#!/bin/sh\nexec "%s" -m megatron_overlap.cli "$@"\n' "$PWD/.venv/bin/python" > .venv/bin/megatron-overlap
    chmod +x .venv/bin/megatron-overlap
    cksum < pyproject.toml | tr -d '\n' > .venv/installed
fi
# The first comparison: one command after the clone.
step bash scripts/quickstart.sh --rounds 1
first=$((SECONDS - started))
# Their own run: a config of theirs, looked at, and launched.
step cp configs/cpu/llama_tp2/overlap.yaml my.yaml
step .venv/bin/megatron-overlap launch my.yaml --dry-run
step .venv/bin/megatron-overlap launch my.yaml train.iterations=3
printf '\nfirst comparison after %d s, own run after %d s; 5 commands\n' "$first" $((SECONDS - started))
