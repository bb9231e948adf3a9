"""Transformer layers in two halves of a micro-batch, on four ranks: equal to stock, in the order that hides sums."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.adapters.tensor_parallel import batch_overlap_workers as cases
from tests.helpers.world import World

RANKS = 4
SWIGLU = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
# Two layers of two pairs of linears each; both halves go through each, and their weight gradients come together.
CALLS = {(op, direction): 8 for op in ("copy_gemm", "gemm_ar") for direction in ("forward", "dgrad", "wgrad")}


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float32),
        ({"masks": 4}, torch.float32),
        ({"batch": 2, **SWIGLU, "normalization": "RMSNorm"}, torch.float32),
        (SWIGLU, torch.bfloat16),
        ({"prepare": "late"}, torch.float32),
        ({"prepare": "watched"}, torch.float32),
        ({"prepare": "watched before"}, torch.float32),
        ({"prepare": "watched in backward"}, torch.float32),
        ({"alone": True}, torch.float32),
    ],
    ids=[
        "gelu",
        "a-mask-each",
        "swiglu",
        "bf16",
        "gathered-late",
        "watched",
        "watched-before",
        "watched-in-backward",
        "without-a-block",
    ],
)
def test_equal_to_stock(ranks: World, given: dict[str, Any], dtype: torch.dtype) -> None:
    for calls, reasons in ranks.run(RANKS, cases.against_stock, dtype=dtype, **given):
        assert reasons == []
        assert calls == CALLS


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"batch": 3}, "a micro-batch of 3 has no two equal halves"),
        ({"sequence_parallel": True}, "sequence parallelism"),
        ({"recompute_granularity": "selective"}, "activation recomputation"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
        ({"hidden_dropout": 0.1}, "dropout: halves would draw other masks"),
        ({"prepare": "another MLP"}, "its MLP or its attention is of another kind"),
        ({"prepare": "cross-attention"}, "cross-attention"),
        ({"alone": True, "beside": {"sequence_len_offset": 0}}, "arguments that are not known here: sequence_len_"),
        ({"alone": True, "prepare": "offloading"}, "activations are offloaded to the CPU"),
        ({"alone": True, "prepare": "fp8"}, "fp8"),
        ({"prepare": "no order"}, "does not let a node say when it runs"),
    ],
    ids=[
        "odd",
        "sp",
        "recompute",
        "fp32-residual",
        "dropout",
        "another-mlp",
        "cross-attention",
        "unknown-argument",
        "offloading",
        "fp8",
        "no-order",
    ],
)
def test_what_stays_whole_is_named(ranks: World, given: dict[str, Any], reason: str) -> None:
    for calls, reasons in ranks.run(RANKS, cases.against_stock, **given):
        assert [why for why in reasons if reason in why], reasons
        # By each layer's own overlap.
        assert sum(calls.values()) > 0


def test_a_layer_that_stays_whole_is_given_all_of_it(ranks: World) -> None:
    for calls, reasons in ranks.run(RANKS, cases.against_stock, prepare="second whole", **SWIGLU):
        assert reasons == ["activation recomputation"]
        # Recomputation runs the second MLP's forward twice, whole.
        assert calls["gemm_ar", "forward"] == 4 + 3


@pytest.mark.parametrize("prepare", ["nothing", "late"])
def test_sums_travel_under_the_other_half(ranks: World, prepare: str) -> None:
    """Parts 1 to 4: attention, MLP, attention, MLP. What is begun is waited for when the next but one begins."""
    for forward, backward in ranks.run(RANKS, cases.order, prepare=prepare):
        assert forward == [
            *("start a1", "start b1", "wait a1", "start a2", "wait b1", "start b2"),
            *("wait a2", "start a3", "wait b2", "start b3", "wait a3", "start a4", "wait b3", "start b4"),
            *("wait a4", "wait b4"),
        ]
        assert backward == [
            *("start b4", "start a4", "wait b4", "start b3", "wait a4", "start a3", "wait b3", "start b2"),
            *("wait a3", "start a2", "wait b2", "start b1", "wait a2", "start a1"),
            *("wait b1", "wait a1"),
        ]
