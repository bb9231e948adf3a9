"""The joint MLP on four ranks: equal to Megatron's stock MLP, and hooks run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.tensor_parallel import mlp_workers as cases
from tests.helpers.world import World

RANKS = 4
JOINT = {("mlp", "copy_gemm"), ("mlp", "gemm_ar")}
PER_LAYER = {("column", "copy_gemm"), ("row", "gemm_ar")}
SWIGLU = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}


@pytest.mark.parametrize(
    ("settings", "recompute", "dtype"),
    [
        ({}, False, torch.float32),
        ({"bias_activation_fusion": True}, True, torch.float32),
        (SWIGLU, True, torch.float32),
        (SWIGLU, False, torch.bfloat16),
        ({**SWIGLU, "bias_activation_fusion": True}, False, torch.float32),
    ],
    ids=["gelu", "fused-gelu-recomputed", "swiglu-recomputed", "swiglu-bf16", "fused-swiglu"],
)
def test_equal_to_stock(ranks: World, settings: dict[str, Any], recompute: bool, dtype: torch.dtype) -> None:
    for done in ranks.run(RANKS, cases.against_stock, dtype=dtype, recompute=recompute, **settings):
        assert {(kind, op) for kind, op, *_ in done} == JOINT
        # Recomputation runs forward twice.
        assert {(op, direction): count for _, op, direction, count in done} == {
            **{(op, "forward"): 1 + recompute for _, op in JOINT},
            **{(op, direction): 1 for _, op in JOINT for direction in ("dgrad", "wgrad")},
        }


def test_a_parameter_gather_in_a_hook_is_awaited(ranks: World) -> None:
    for done in ranks.run(RANKS, cases.against_stock, prepare="gathered late"):
        assert {(kind, op) for kind, op, *_ in done} == JOINT


def test_a_frozen_weight(ranks: World) -> None:
    for done in ranks.run(RANKS, cases.against_stock, prepare="frozen"):
        assert ("mlp", "copy_gemm", "wgrad") not in {tuple(each[:3]) for each in done}


@pytest.mark.parametrize("prepare", ["forward hook", "backward hook", "replaced"])
def test_layers_with_hooks_run_alone(ranks: World, prepare: str) -> None:
    for done in ranks.run(RANKS, cases.against_stock, prepare=prepare):
        assert {(kind, op) for kind, op, *_ in done} == PER_LAYER


def test_joint_mlp_none_overlaps_each_layer_alone(ranks: World) -> None:
    for done in ranks.run(RANKS, cases.against_stock, joint_mlp="none"):
        assert {(kind, op) for kind, op, *_ in done} == PER_LAYER
