#!/usr/bin/env bash
# Trains a small LLaMA on real text with and without the overlap, on two hosts made on this machine, and compares.
# Needs Python 3.12 or newer and no GPU. Computes in fp32 where the processor has no bf16. Arguments go to
# `megatron-overlap compare`.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup.sh
setup_environment
.venv/bin/python scripts/prepare_data.py --output data/stdlib
precision=$(.venv/bin/python -W ignore -m megatron_overlap.tools.gemm_rate)
exec .venv/bin/megatron-overlap compare configs/cpu/quickstart.yaml --output runs/quickstart "train.precision=$precision" "$@"
