# Sourced by scripts/test.sh, scripts/quickstart.sh and CI: makes .venv with all that the repository needs.
# `bash scripts/setup.sh te` makes .transformer_engine.

MINIMUM_PYTHON="3.12"

say_missing() {
    printf 'megatron_overlap: %s\n' "$*" >&2
    exit 2
}

# Prints a Python that is new enough, or nothing; 3.12 first, as that is what the tests run on most. pyenv's shims exist
# for versions that are not selected, and fail: each is tried, then what pyenv has installed.
find_python() {
    local candidate versions
    for candidate in "${PYTHON:-}" python3.12 python3 python3.13 python3.14; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 || continue
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    if command -v pyenv >/dev/null 2>&1; then
        versions=$(pyenv versions --bare 2>/dev/null | grep -E '^3\.(1[2-9]|[2-9][0-9])(\.[0-9]+)?$' | sort -V | head -n 1)
        [ -n "$versions" ] && PYENV_VERSION=$versions pyenv which python 2>/dev/null
    fi
    return 0
}

# .venv with the package and its test extra; done again only if pyproject.toml has changed.
setup_environment() {
    local python wanted
    wanted=$(cksum < pyproject.toml)
    if [ -x .venv/bin/python ] && [ "$(cat .venv/installed 2>/dev/null)" = "$wanted" ]; then
        return
    fi
    python=$(find_python)
    [ -n "$python" ] || say_missing "no Python $MINIMUM_PYTHON or newer was found (megatron-core needs it):" \
        "install one, or name it with PYTHON=/path/to/python3.12"
    "$python" -m venv --help >/dev/null 2>&1 ||
        say_missing "$python has no venv module: install it (Debian and Ubuntu: apt install python3-venv)"
    if [ -e .venv ] && [ ! -e .venv/installed ]; then
        say_missing ".venv exists, and this script has not made it: move it away"
    fi
    printf 'megatron_overlap: installing into .venv with %s (torch and megatron-core: about 5 GB)\n' "$python" >&2
    rm -rf .venv
    "$python" -m venv .venv
    touch .venv/installed
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
    printf '%s' "$wanted" > .venv/installed
}

TRANSFORMER_ENGINE="transformer_engine==2.20.2 onnx==1.23.2 onnxscript==0.7.2 onnx_ir==1.1.0 ml_dtypes==0.6.0 einops==0.8.2"

# .transformer_engine with TransformerEngine's Python (54 MB), for CPU ranks with kernels in PyTorch. Not in .venv: without a
# GPU the package raises at import, and Megatron imports it wherever it is. Without a network the tests that need it skip.
setup_transformer_engine() {
    if [ "$(cat .transformer_engine/installed 2>/dev/null)" = "$TRANSFORMER_ENGINE" ]; then
        return
    fi
    rm -rf .transformer_engine
    # shellcheck disable=SC2086
    if .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --retries 1 --timeout 20 \
        --target .transformer_engine $TRANSFORMER_ENGINE; then
        printf '%s' "$TRANSFORMER_ENGINE" > .transformer_engine/installed
    else
        rm -rf .transformer_engine
        printf 'megatron_overlap: TransformerEngine is not installed (no network?): its tests skip\n' >&2
    fi
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    set -euo pipefail
    cd "$(dirname "$0")/.."
    setup_environment
    if [ "${1:-}" = te ]; then setup_transformer_engine; fi
fi
