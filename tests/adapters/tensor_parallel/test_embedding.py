"""Batch overlap of the embedding on two ranks: equal to stock, and read by the first layer only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import embedding_workers as cases
from tests.helpers.world import World

BATCH, SEQUENCE = ({"method": "p2p", "split": split} for split in ("batch", "sequence"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "given",
    [
        {"tensor": BATCH},
        {"tensor": BATCH, "own_rows": 3, "batch": 4, "steps": 2},
        {"tensor": SEQUENCE},
        {"tensor": {**SEQUENCE, "split_at": 0.7}, "own_rows": 5, "batch": 1, "steps": 2},
        {"tensor": BATCH, "prepare": "late"},
        {"tensor": {**BATCH, "schedule": "serial"}},
    ],
    ids=["batch", "batch-odd", "sequence", "sequence-odd", "gathered-late", "serial"],
)
def test_the_first_layer_sums_the_embedding(ranks: World, given: dict[str, Any], dtype: torch.dtype) -> None:
    steps = given.get("steps", 1)
    assert ranks.run(RANKS, cases.against_stock, dtype=dtype, **given) == [(steps, 0)] * RANKS


def test_an_evaluated_model_too(ranks: World) -> None:
    assert ranks.run(RANKS, cases.against_stock, tensor=BATCH, training=False) == [(1, 0)] * RANKS
    # No linear layer has been measured in a pass without gradients.
    assert ranks.run(RANKS, cases.against_stock, tensor={"method": "auto"}, training=False) == [(0, 0)] * RANKS


@pytest.mark.parametrize(
    "given",
    [
        {"prepare": "first unsupported"},
        {"batch": 3},
        {"tensor": {"method": "auto"}, "steps": 2},
    ],
    ids=["unsupported-layer", "odd-batch", "auto"],
)
def test_a_layer_that_runs_whole_gets_the_complete_output(ranks: World, given: dict[str, Any]) -> None:
    given = {"tensor": BATCH, **given}
    steps = given.get("steps", 1)
    assert ranks.run(RANKS, cases.against_stock, **given) == [(steps, steps)] * RANKS


@pytest.mark.parametrize(
    "given",
    [
        {"prepare": "hook", "reason": "a hook reads the output"},
        {"prepare": "hook of the words", "reason": "a hook reads the output"},
        {"prepare": "hook of the block", "reason": "a hook reads the input of the first layer"},
        {"prepare": "backward hook", "reason": "a hook reads the input of the first layer"},
        {"prepare": "subclass", "reason": "the model is not a GPTModel"},
        {"position": "learned_absolute", "reason": "position embeddings are added before"},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
            "reason": "full activation recomputation",
        },
        {"tensor": {"method": "p2p", "split": "none"}},
    ],
    ids=["hook", "words", "block", "backward-hook", "subclass", "positions", "recomputation", "no-split"],
)
def test_an_output_that_other_code_may_read_is_complete(ranks: World, given: dict[str, Any]) -> None:
    assert ranks.run(RANKS, cases.against_stock, **{"tensor": BATCH, **given}) == [(0, 0)] * RANKS


def test_a_copy_of_the_output_is_an_error(ranks: World) -> None:
    for message in ranks.run(RANKS, cases.is_refused):
        assert "the input of the first transformer layer is not the output of the embedding" in message


def test_an_error_leaves_no_output_behind(ranks: World) -> None:
    assert ranks.run(RANKS, cases.runs_after_an_error) == [True] * RANKS


def test_terms_are_freed_before_layers_that_run_whole(ranks: World) -> None:
    assert ranks.run(RANKS, cases.is_freed) == [True] * RANKS


@pytest.mark.parametrize("split", ["batch", "sequence"])
def test_messages_of_the_embedding_overlap_the_other_part(ranks: World, split: str) -> None:
    """The first layer hides the sum of part b in forward, and the gather of its gradient in backward."""
    for forward, backward in ranks.run(RANKS, cases.order, split):
        assert forward == [
            *("start a output", "wait a output", "start a input", "start b output", "wait a input"),
            *("wait b output", "start b input", "start a output"),
        ]
        assert backward == [
            *("wait a output gradient", "wait b input gradient", "start b output gradient", "start a input gradient"),
            *("wait a input", "wait b output gradient", "wait a input gradient", "start a output gradient"),
            "wait a output gradient",
        ]
