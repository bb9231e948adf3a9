"""Whole trainings of mixtures of experts, with and without the plugin: every loss and grad-norm.

`scripts/equality.py` has the full matrix.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import yaml

from tests.adapters.megatron_runs import SCRIPTS, TE_LAYERS, assert_equal_training, train
from tests.adapters.test_training import SHARDED, assert_overlapped, tensor_calls
from tests.helpers.te import needs_te

LLAMA = SCRIPTS / "pretrain_llama.py"
EXPERTS = shlex.split(
    "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 "
    "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01 --moe-shared-expert-intermediate-size 32"
)
CALLS = tensor_calls("expert_parallel")


def compare(folder: Path, ranks: int, *layout: str) -> None:
    file = folder / "overlap.yaml"
    methods = {"tensor": {"method": "none"}, "data": {"method": "stock"}, "expert": {"method": "p2p"}}
    file.write_text(yaml.safe_dump({"overlap": {**methods, "strict": True}}))
    mine = train(folder / "mine", LLAMA, ranks, *layout, "--overlap-config", str(file), off=False)
    assert_equal_training(mine, train(folder / "stock", LLAMA, ranks, *layout))
    assert_overlapped(folder / "mine", ranks=ranks, expected=CALLS)


def test_two_expert_ranks_with_gathered_parameters(tmp_path: Path) -> None:
    """The distributed optimizer gathers parameters in pre-hooks of modules that the operation does not call."""
    compare(tmp_path, 2, *EXPERTS, *SHARDED)


@needs_te
@pytest.mark.long
def test_grouped_experts_of_transformer_engine(tmp_path: Path) -> None:
    compare(tmp_path, 2, *EXPERTS, *SHARDED, *TE_LAYERS, "--moe-grouped-gemm")


@pytest.mark.long
def test_expert_and_data_parallel_ranks(tmp_path: Path) -> None:
    compare(tmp_path, 4, *EXPERTS, *SHARDED, "--micro-batch-size", "1", "--moe-expert-capacity-factor", "1.0")
