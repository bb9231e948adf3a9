"""Batch overlap of Megatron's transformer layers: equal to stock, in the order that hides all-reduces."""

from __future__ import annotations

from importlib.metadata import version as release
from typing import Any

import pytest
import torch

from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import batch_overlap_workers as cases
from tests.helpers.world import World

SWIGLU = {"gated_linear_unit": True, "activation_func": "silu", "add_bias_linear": False}
# Two layers with two pairs of linear layers each, run for both parts of the batch. The weight gradients are summed.
CALLS = {
    sequence_parallel: {(op, direction): 8 for op in ops for direction in ("forward", "dgrad", "wgrad")}
    for sequence_parallel, ops in ((False, ("copy_gemm", "gemm_ar")), (True, ("ag_gemm", "gemm_rs")))
}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["no-sp", "sp"])
@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float32),
        ({"masks": 4}, torch.float32),
        ({"batch": 2, **SWIGLU, "normalization": "RMSNorm"}, torch.float32),
        (SWIGLU, torch.bfloat16),
        ({"prepare": "late"}, torch.float32),
        ({"prepare": "hook"}, torch.float32),
        ({"prepare": "pre-hook"}, torch.float32),
        ({"prepare": "backward hook"}, torch.float32),
        ({"alone": True}, torch.float32),
    ],
    ids=[
        "gelu",
        "a-mask-each",
        "swiglu",
        "bf16",
        "gathered-late",
        "hook",
        "pre-hook",
        "backward-hook",
        "without-a-block",
    ],
)
def test_equal_to_stock(ranks: World, given: dict[str, Any], dtype: torch.dtype, sequence_parallel: bool) -> None:
    given = {**given, "sequence_parallel": sequence_parallel}
    for calls, reasons in ranks.run(RANKS, cases.against_stock, dtype=dtype, **given):
        assert reasons == []
        assert calls == CALLS[sequence_parallel]


@pytest.mark.parametrize(
    "given",
    [
        {"sequence_parallel": False},
        {"sequence_parallel": True, "batch": 2, "rotary": 1, **SWIGLU},
        {"sequence_parallel": True, "split": "sequence", "masks": 0, "odd": True, "split_at": 0.7, "rotary": 1},
        {"sequence_parallel": True, "split": "sequence", "carried_by": "copies"},
        {"sequence_parallel": True, "carried_by": "collectives", **FULL, "recompute_num_layers": 1},
    ],
    ids=["no-sp", "sp", "sequence", "copies", "collectives"],
)
def test_four_ranks_equal_stock(four_ranks: World, given: dict[str, Any]) -> None:
    for _, reasons in four_ranks.run(4, cases.against_stock, **given):
        assert reasons == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("split", ["batch", "sequence"])
@pytest.mark.parametrize("carried_by", ["collectives", "copies"])
def test_parts_as_on_gpus_equal_stock(ranks: World, carried_by: str, split: str, dtype: torch.dtype) -> None:
    given = {"sequence_parallel": True, "split": split, "carried_by": carried_by}
    for calls, reasons in ranks.run(RANKS, cases.against_stock, dtype=dtype, **given):
        assert reasons == []
        assert calls == CALLS[True]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({"batch": 1}, torch.float32),
        ({"batch": 1, "masks": 0, "num_query_groups": 4, **SWIGLU}, torch.float32),
        ({"batch": 2, "rotary": 1, **SWIGLU, "normalization": "RMSNorm"}, torch.float32),
        ({"batch": 1, "masks": 0, "rotary": 1, **SWIGLU}, torch.bfloat16),
        ({"batch": 1, "prepare": "late"}, torch.float32),
        ({"batch": 1, "alone": True, "rotary": 1}, torch.float32),
        ({"batch": 1, "odd": True, "rotary": 1}, torch.float32),
        ({"batch": 1, "masks": 0, "odd": True, "split_at": 0.7, "rotary": 1}, torch.float32),
    ],
    ids=["gelu", "no-mask", "rotary", "bf16", "gathered-late", "without-a-block", "odd", "split-at"],
)
def test_a_split_sequence_equals_stock(ranks: World, given: dict[str, Any], dtype: torch.dtype) -> None:
    given = {"sequence_parallel": True, "split": "sequence", **given}
    for calls, reasons in ranks.run(RANKS, cases.against_stock, dtype=dtype, **given):
        assert reasons == []
        assert calls == CALLS[True]


@pytest.mark.parametrize(
    ("split", "given"),
    [
        ("none", {"sequence_parallel": False}),
        ("none", {"sequence_parallel": True, "num_query_groups": 4, **SWIGLU}),
        ("batch", {"sequence_parallel": False, "num_query_groups": 4, **SWIGLU}),
        ("batch", {"sequence_parallel": True, "batch": 2, "rotary": 1}),
        ("sequence", {"batch": 1, "masks": 0, "num_query_groups": 4, "rotary": 1, **SWIGLU}),
        ("sequence", {"batch": 2, "odd": True, "split_at": 0.7}),
        ("sequence", {"batch": 1, "masks": 0, "dtype": torch.bfloat16}),
    ],
    ids=["no-sp", "sp", "batch-no-sp", "batch", "sequence", "sequence-mask", "sequence-bf16"],
)
@pytest.mark.parametrize(
    ("recompute", "num_recomputed", "num_skipped"),
    [
        ({"recompute_granularity": "selective"}, 0, 0),
        ({**FULL, "recompute_num_layers": 1}, 2, 2),
        ({**FULL, "recompute_num_layers": 2}, 2, 1),
        ({**FULL, "recompute_method": "block", "recompute_num_layers": 1}, 1, 1),
        ({**FULL, "recompute_method": "block", "recompute_num_layers": 2}, 2, 2),
    ],
    ids=["selective", "uniform-1", "uniform-2", "block-1", "block-2"],
)
def test_recomputed_layers_equal_stock(
    ranks: World, split: str, given: dict[str, Any], recompute: dict[str, Any], num_recomputed: int, num_skipped: int
) -> None:
    """The last linear layer of each recomputed part computes nothing: its output is NaN, and no code reads it."""
    given = {"sequence_parallel": True, "split": split, **given, **recompute}
    column, row = ("ag_gemm", "gemm_rs") if given["sequence_parallel"] else ("copy_gemm", "gemm_ar")
    parts = 1 if split == "none" else 2
    expected = {(op, direction): 4 * parts for op in (column, row) for direction in ("forward", "dgrad", "wgrad")}
    expected[column, "forward"] += 2 * parts * num_recomputed
    expected[row, "forward"] += parts * (2 * num_recomputed - num_skipped)
    if num_skipped:
        expected[row, "skipped forward"] = parts * num_skipped
    for calls, reasons in ranks.run(RANKS, cases.against_stock, **given):
        assert reasons == []
        assert calls == expected


@pytest.mark.parametrize("split", ["none", "batch"])
@pytest.mark.parametrize(
    "given",
    [{"recompute_output": "compute"}, {"prepare": "own residual"}, {"prepare": "hook of the MLP"}],
    ids=["configured", "another-residual", "hook"],
)
def test_recomputed_outputs_that_may_be_read_are_computed(ranks: World, split: str, given: dict[str, Any]) -> None:
    given = {"sequence_parallel": True, "split": split, **FULL, "recompute_num_layers": 1, **given}
    for calls, _ in ranks.run(RANKS, cases.against_stock, **given):
        assert ("gemm_rs", "skipped forward") not in calls
        assert calls["gemm_rs", "forward"] == 2 * calls["gemm_rs", "dgrad"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", ["none", "batch", "sequence"])
def test_skipped_outputs_change_no_bit(ranks: World, split: str, dtype: torch.dtype) -> None:
    assert ranks.run(RANKS, cases.bits_of_skipped_outputs, split, dtype) == [True] * RANKS


@pytest.mark.parametrize("split", ["batch", "sequence"])
def test_core_attention_of_both_parts_is_recomputed(ranks: World, split: str) -> None:
    assert ranks.run(RANKS, cases.core_attention_calls, split) == [[4, 4, 4, 4]] * RANKS


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["no-sp", "sp"])
def test_layers_outside_of_their_block_return_their_output(ranks: World, sequence_parallel: bool) -> None:
    given = {"alone": True, "prepare": "after a block", "sequence_parallel": sequence_parallel}
    for _, reasons in ranks.run(RANKS, cases.against_stock, **given):
        assert reasons == []


@pytest.mark.skipif(release("megatron-core") < "0.17", reason="the block returns its output only")
def test_an_output_that_the_block_returns_is_complete(ranks: World) -> None:
    assert ranks.run(RANKS, cases.extracted_is_finite) == [True] * RANKS


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"sequence_parallel": False}, "a split sequence needs --sequence-parallel"),
        ({"window_size": (3, 0), "masks": 0}, "sliding-window attention"),
    ],
    ids=["no-sp", "window"],
)
def test_a_sequence_that_does_not_split_has_a_reason(ranks: World, given: dict[str, Any], reason: str) -> None:
    given = {"batch": 1, "sequence_parallel": True, "split": "sequence", **given}
    for _, reasons in ranks.run(RANKS, cases.against_stock, **given):
        assert [each for each in reasons if reason in each], reasons


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"batch": 3}, "a micro-batch of 3 does not split into two equal parts"),
        # Without a bias: Megatron's recomputation of an MLP with one does not end.
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"], **SWIGLU}, "of a norm or the MLP"),
        ({"alone": True, "prepare": "fp8"}, "TransformerEngine recomputes the activations (fp8)"),
        ({"fp32_residual_connection": True}, "--fp32-residual-connection"),
        ({"hidden_dropout": 0.1}, "dropout: the parts of a split batch would draw other masks"),
        ({"prepare": "another MLP"}, "the MLP is not an MLP or the attention is not a SelfAttention"),
        ({"prepare": "another layer"}, "Scaled overrides _forward_mlp"),
        (
            {"prepare": "checkpointed layer", "masks": 0},
            "the forward of the layer, its attention or its MLP",
        ),
        ({"prepare": "checkpointed MLP"}, "the forward of the layer, its attention or its MLP"),
        ({"prepare": "checkpoint within"}, "torch.utils.checkpoint recomputes the layer"),
        ({"prepare": "cross-attention"}, "cross-attention"),
        ({"alone": True, "beside": {"sequence_len_offset": 0}}, "unknown arguments: sequence_len_"),
        ({"alone": True, "prepare": "offloading"}, "activations are offloaded to the CPU"),
        ({"prepare": "hook of a linear layer"}, "a hook reads the input or the output of a linear layer"),
        ({"prepare": "pre-hook of a linear layer"}, "a hook reads the input or the output of a linear layer"),
        ({"prepare": "hook of the MLP"}, "a hook reads the input or the output of the attention or the MLP"),
        ({"prepare": "pre-hook of the MLP"}, "a hook reads the input or the output of the attention or the MLP"),
        ({"prepare": "hook of the attention"}, "a hook reads the input or the output of the attention or the MLP"),
        ({"frozen_input": True}, "the input requires no gradient, but a weight does"),
        ({"frozen_input": True, "sequence_parallel": True}, "the input requires no gradient, but a weight does"),
        ({"frozen_input": True, "prepare": "frozen below", **SWIGLU}, "the input requires no gradient, but a weight"),
        ({"rotary": 4}, "each sequence has rotary angles of its own"),
        ({"mtp_use_repeated_layer": True}, "--mtp-use-repeated-layer: a weight has several gradients in a pass"),
    ],
    ids=[
        "odd",
        "recompute",
        "recompute-fp8",
        "fp32-residual",
        "dropout",
        "another-mlp",
        "another-layer",
        "checkpointed-layer",
        "checkpointed-mlp",
        "checkpoint-within",
        "cross-attention",
        "unknown-argument",
        "offloading",
        "hook",
        "pre-hook-linear",
        "hook-mlp",
        "pre-hook-mlp",
        "hook-attention",
        "frozen-input",
        "frozen-input-sp",
        "frozen-layer",
        "mrope",
        "repeated-layer",
    ],
)
def test_an_unsupported_layer_has_a_reason(ranks: World, given: dict[str, Any], reason: str) -> None:
    for calls, reasons in ranks.run(RANKS, cases.against_stock, **given):
        assert [each for each in reasons if reason in each], reasons
        # Each linear layer is overlapped alone.
        assert sum(calls.values()) > 0


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["no-sp", "sp"])
@pytest.mark.parametrize("split", ["batch", "sequence"])
@pytest.mark.parametrize("prepare", ["first unsupported", "second unsupported", "changes late"])
def test_an_unsupported_layer_gets_the_complete_input(
    ranks: World, prepare: str, split: str, sequence_parallel: bool
) -> None:
    if split == "sequence" and not sequence_parallel:
        pytest.skip("a split sequence needs sequence parallelism")
    given = {**SWIGLU, "sequence_parallel": sequence_parallel, "split": split}
    for calls, reasons in ranks.run(RANKS, cases.against_stock, prepare=prepare, **given):
        assert reasons == ["activation recomputation of a norm or the MLP (--recompute-modules)"]
        # Recomputation runs the forward of the MLP twice.
        assert calls["gemm_rs" if sequence_parallel else "gemm_ar", "forward"] == 4 + 3


@pytest.mark.parametrize("prepare", ["nothing", "late"])
def test_all_reduces_overlap_the_other_part(ranks: World, prepare: str) -> None:
    """Steps 1 to 4: attention, MLP, attention, MLP. The wait comes when the step after the next one starts."""
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


def _messages(num_layers: int) -> tuple[list[str], list[str]]:
    """The order of messages in forward and backward of layers that hand off their output."""
    positions = ("ba", "ab") * (2 * num_layers - 1)
    forward = ["start a input", "wait a input", "start b input", "start a output"]
    for part, other in positions:
        forward += [f"wait {part} input", f"wait {other} output", f"start {other} input", f"start {part} output"]
    forward += ["wait b input", "start b output", "wait a output", "wait b output"]
    backward = ["start b output gradient", "start b input", "wait b output gradient"]
    backward += ["start a output gradient", "start a input", "start b input gradient"]
    of_attention = (False, True, True, False) * num_layers
    for (other, part), attends in zip(positions, of_attention, strict=False):
        backward += [f"wait {other} input", f"wait {part} output gradient", *["attention"] * attends]
        backward += [f"wait {other} input gradient"]
        backward += [f"start {other} output gradient", f"start {other} input", f"start {part} input gradient"]
    backward += ["wait b input", "wait a output gradient", "attention", "wait b input gradient"]
    backward += ["start a input gradient", "wait a input", "wait a input gradient"]
    return forward, backward


def test_messages_of_sequence_parallelism_overlap_the_other_part(ranks: World) -> None:
    """Between the start of a message and its wait is a GEMM of the other part, at the first and last steps apart."""
    for order in ranks.run(RANKS, cases.sharded_order):
        assert order == _messages(2)


ATTENTION_OF_B = {
    1: ["start a input", "softmax", "attention"],
    2: ["start a input", "softmax", "attention"],
    3: ["softmax", "start a input", "attention"],
    4: ["softmax", "attention", "start a input"],
}
"""Forward of attention b, by the query that finds messages arrived. The first one follows the column-parallel GEMM."""


@pytest.mark.parametrize(("arrives_at", "expected"), ATTENTION_OF_B.items())
def test_attention_starts_the_other_step_when_its_input_has_arrived(
    ranks: World, arrives_at: int, expected: list[str]
) -> None:
    for order in ranks.run(RANKS, cases.attention_order, arrives_at=arrives_at):
        assert order[:7] == ["start a input", "start b input", "softmax", "attention", *expected]


def test_a_recomputed_core_attention_does_not_start_the_other_step(ranks: World) -> None:
    for order in ranks.run(RANKS, cases.attention_order, arrives_at=2, recompute_granularity="selective"):
        assert order[4:7] == ATTENTION_OF_B[4]


@pytest.mark.parametrize("num_layers", [1, 2])
def test_layers_hand_off_inside_a_recomputed_part_in_both_passes(ranks: World, num_layers: int) -> None:
    """Backward does not send the outputs of the last step of a part again."""
    forward, backward = _messages(num_layers)
    recomputed = forward[::-1]
    for message in ("start a output", "start b output", "wait a output", "wait b output"):
        recomputed.remove(message)
    recomputed.reverse()
    parts = 2 // num_layers
    for order in ranks.run(RANKS, cases.sharded_order, **FULL, recompute_num_layers=num_layers):
        assert order == (forward * parts, [*recomputed, *backward] * parts)
