#!/usr/bin/env bash
# The wheel as a stranger gets it: built, installed into a fresh environment outside this repository, and used from there.
# Needs Python 3.12 or newer (PYTHON names it) and no GPU.
# With --shared-packages the environment sees the packages of $PYTHON, so that torch and Megatron are not installed again.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
. scripts/setup.sh
PYTHON=${PYTHON:-$(find_python)}
[ -n "$PYTHON" ] || say_missing "no Python $MINIMUM_PYTHON or newer was found"
place=$(mktemp -d)
say() { printf '\n== %s\n' "$*"; }

say "build"
"$PYTHON" -m pip wheel --quiet --no-deps --wheel-dir "$place/wheel" .
wheel=$(ls "$place"/wheel/megatron_overlap-*.whl)
printf 'wheel: %s, %s bytes\n' "$(basename "$wheel")" "$(stat -c %s "$wheel")"

say "a fresh environment in $place"
"$PYTHON" -m venv "$place/env"
options=()
if [ "${1:-}" = --shared-packages ]; then
    # Without the editable install of this repository, which must not be what runs.
    "$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])' > "$place/packages"
    site=$("$place/env/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    cp "$place/packages" "$site/shared.pth"
    options=(--no-deps)
fi
"$place/env/bin/python" -m pip install --quiet --disable-pip-version-check "${options[@]}" "$wheel"
if [ ${#options[@]} -eq 0 ]; then
    "$place/env/bin/python" -m pip install --quiet --disable-pip-version-check megatron-core==0.19.2 six regex
fi

cd "$place"
unset PYTHONPATH
env/bin/python -c 'import megatron_overlap, sys; assert megatron_overlap.__file__.startswith(sys.prefix), megatron_overlap.__file__'

say "patches"
env/bin/megatron-overlap patches
found=$(find env/lib/python*/site-packages/megatron_overlap/_patches -name "*.yaml" | wc -l)
printf '%s patches in the wheel\n' "$found"
[ "$found" -eq "$(find "$root/patches" -name "*.yaml" | wc -l)" ]

say "doctor"
env/bin/megatron-overlap doctor --deadline 60

say "quickstart config, two steps, on made-up data"
env/bin/megatron-overlap launch cpu/quickstart --run-dir run \
    data.kind=mock data.path=null train.iterations=2 train.lr_warmup_iterations=0
printf '\ncheck_wheel: passed\n'
