"""Linear layers that a CUDA graph captures: replays over copies, and the reasons of calls that cannot be captured."""

from __future__ import annotations

from typing import Any

import pytest

from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import captured_workers as cases
from tests.helpers.world import World

STEPS = 100
CAPTURED = "a CUDA graph is being captured"


@pytest.mark.parametrize(
    ("tensor", "plain"),
    [
        ({"method": "p2p", "chunks_per_rank": 2}, False),
        ({"method": "p2p", "schedule": "ring"}, False),
        ({"method": "p2p", "chunks_per_rank": 2}, True),
    ],
)
def test_a_hundred_replays_of_both_layers(ranks: World, tensor: dict[str, Any], plain: bool) -> None:
    """Forward and backward are captured in two graphs. The report counts a captured pass once."""
    ops = ("copy_gemm", "gemm_ar") if plain else ("ag_gemm", "gemm_rs")
    passes = {f"{op} {way}": 1 for op in ops for way in ("forward", "dgrad", "wgrad")}
    for different, num_changed, counted in ranks.run(RANKS, cases.replay, STEPS, tensor, plain):
        assert different == []
        assert num_changed == STEPS
        assert counted == passes


def test_the_reasons_of_calls_that_are_not_captured(ranks: World) -> None:
    found = [None, f"{CAPTURED} before a call of the same shape", CAPTURED, CAPTURED]
    found.append(f"{CAPTURED}: fused kernels cannot be replayed")
    assert ranks.run(RANKS, cases.reasons) == [{"column": found, "row": found}] * RANKS


def test_a_captured_call_runs_the_selection_of_the_autotuner(ranks: World) -> None:
    assert ranks.run(RANKS, cases.autotuned) == [["stock", "p2p", "p2p"]] * RANKS


@pytest.mark.parametrize("kind", ["column", "row"])
def test_messages_over_gloo_are_not_captured(ranks: World, kind: str) -> None:
    assert ranks.run(RANKS, cases.captured_over_gloo, kind) == [[CAPTURED]] * RANKS


def test_joint_operations_are_not_captured(ranks: World) -> None:
    assert ranks.run(RANKS, cases.joint_operations) == [[CAPTURED] * 3] * RANKS


def test_autotuning_lists_the_candidates_of_the_transport(ranks: World) -> None:
    found = dict.fromkeys(("ag_gemm", "gemm_rs", "copy_gemm", "gemm_ar"), True)
    assert ranks.run(RANKS, cases.settings_of_copies) == [found] * RANKS
