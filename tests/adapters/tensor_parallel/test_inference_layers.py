"""Megatron's `inference_optimized` linear layers are overlapped above the threshold, and equal to the stock path."""

from __future__ import annotations

import pytest
import torch

from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import inference_layer_workers as cases
from tests.adapters.tensor_parallel.inference_layer_workers import THRESHOLD
from tests.helpers.te import needs_te
from tests.helpers.world import World

pytestmark = needs_te
OPS = {"row": "gemm_rs", "column": "ag_gemm", "norm": "ag_gemm"}
CLASSES = {
    "row": "InferenceRowParallelLinear",
    "column": "InferenceColumnParallelLinear",
    "norm": "InferenceLayerNormColumnParallelLinear",
}


@pytest.mark.parametrize("kind", OPS)
def test_prefill_is_overlapped_and_decode_runs_the_stock_path(te_ranks: World, kind: str) -> None:
    rows = [2 * THRESHOLD, 8, THRESHOLD, 8]
    for found, _, ran in te_ranks.run(RANKS, cases.calls, kind, "auto", rows, {}):
        assert list(found) == [(OPS[kind], "forward only")]
        count = found[OPS[kind], "forward only"]
        assert (count.overlapped, count.stock) == (2, 2)
        assert [each.split()[1] for each in ran] == ["p2p", "p2p"], "no decode call runs through the autotuner"


@pytest.mark.parametrize("kind", OPS)
def test_p2p_overlaps_every_call(te_ranks: World, kind: str) -> None:
    for found, *_ in te_ranks.run(RANKS, cases.calls, kind, "p2p", [8, 2 * THRESHOLD], {}):
        assert found[OPS[kind], "forward only"].overlapped == 2


@pytest.mark.parametrize("kind", ["row", "norm"])
def test_a_layer_that_megatron_fuses_is_a_fallback(te_ranks: World, kind: str) -> None:
    name, value = ("next_layer_norm_weights", torch.ones(32)) if kind == "row" else ("skip_norm_and_all_gather", True)
    for found, reasons, _ in te_ranks.run(RANKS, cases.calls, kind, "p2p", [16], {name: value}, False):
        assert reasons == ["Megatron fuses reduce-scatter, norm and all-gather of this layer"]
        assert found[OPS[kind], "forward only"].overlapped == 0


@pytest.mark.parametrize("kind", OPS)
def test_training_runs_the_transformer_engine_layer(te_ranks: World, kind: str) -> None:
    for found in te_ranks.run(RANKS, cases.trains, kind):
        assert (OPS[kind], "forward only") not in found
        assert found[OPS[kind], "forward"].overlapped == 1
    te_ranks.run(RANKS, cases.training_mode, kind)


@pytest.mark.parametrize("kind", OPS)
def test_an_mxfp8_weight_is_reported(te_ranks: World, kind: str) -> None:
    for excluded in te_ranks.run(RANKS, cases.with_mxfp8_weight, kind):
        assert excluded[CLASSES[kind]] == "the weight is MXFP8"
