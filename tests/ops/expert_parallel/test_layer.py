"""Expert parallelism equals the plain program: all-to-all, expert MLPs, all-to-all. Output and all gradients."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from megatron_overlap.ops import ExpertOptions
from tests.helpers.gemm_rounding import rows_round_alike
from tests.helpers.world import World
from tests.ops.expert_parallel import workers
from tests.ops.expert_parallel.workers import ExpertCase, Kind

SERIAL = ExpertOptions(3, 64, schedule="serial")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_equals_the_plain_program(world: World, ranks: int, kind: Kind) -> None:
    world.run(ranks, workers.compare_with_reference, ExpertCase(kind))


def test_random_routings(world: World) -> None:
    for ranks in (2, 4):
        world.run(ranks, workers.compare_random, ranks, 6)


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_thousand_random_routings(world: World, ranks: int) -> None:
    for seed in range(50):
        world.run(ranks, workers.compare_random, 100 + seed, 20)


@DTYPES
@pytest.mark.parametrize("main_grad", [False, True], ids=["autograd", "main_grad"])
def test_rounding(world: World, main_grad: bool, dtype: torch.dtype) -> None:
    case = ExpertCase(hidden=64, ffn=96, dtype=dtype, main_grad=main_grad)
    world.run(4, workers.compare_rounding, case)


def test_probabilities_in_fp32_of_bf16_tokens(world: World) -> None:
    world.run(2, workers.compare_rounding, ExpertCase(dtype=torch.bfloat16, probs_dtype=torch.float32))


@pytest.mark.parametrize(
    "case",
    [
        ExpertCase("single rows", hidden=64, ffn=96, dtype=torch.float32),
        # Few of the sums of one row round otherwise.
        ExpertCase("single rows", experts=6, hidden=2048, ffn=96, dtype=torch.bfloat16),
    ],
    ids=["fp32", "bf16"],
)
@pytest.mark.skipif(not rows_round_alike(), reason="the GEMMs of this processor select kernels by their rows")
def test_few_rows_round_as_in_the_whole_group(world: World, case: ExpertCase) -> None:
    """A GEMM of one row, in fp32 of three rows, sums in another order. A router amplifies such a difference."""
    assert world.run(4, workers.bitwise, case) == [[]] * 4


def test_results_do_not_depend_on_arrival(world: World) -> None:
    assert all(world.run(4, workers.orders_agree, ExpertCase(dtype=torch.float32)))


def test_a_filler_overlaps_the_first_messages_of_both_passes(world: World) -> None:
    passes = ["expert_parallel", "filler", "experts", "expert_parallel dgrad", "filler", "experts"]
    assert world.run(2, workers.filler_order, "direct") == [passes] * 2


def test_the_serial_schedule_computes_after_all_tokens_are_received_and_before_results_are_sent(world: World) -> None:
    steps = ["received", "filler", "experts", "results"]
    passes = ["expert_parallel", *steps, "expert_parallel dgrad", *steps]
    assert world.run(2, workers.filler_order, "serial") == [passes] * 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(world: World, reentrant: bool) -> None:
    assert all(world.run(2, workers.compare_recomputation, reentrant))


def test_observer_counts_the_passes_and_their_bytes(world: World) -> None:
    for passes in world.run(2, workers.compare_with_reference, ExpertCase("even")):
        # 256 tokens go to the peer, and 256 results return to it: 24 features each, and one probability.
        sent = 256 * (24 + 24 + 1) * 8
        assert passes == [("forward", sent), ("dgrad", sent), ("wgrad", 0)]


def test_saves_the_expert_rows_and_the_input_of_the_activation_where_hooks_pack_them(world: World) -> None:
    for saved, rows in world.run(2, workers.saved_elements):
        assert saved[0] == rows * 24
        assert sum(saved[1:]) == rows * (40 + 1)


@pytest.mark.parametrize(("recompute", "hooks", "again"), [(False, False, 0), (True, False, 1), (False, True, 1)])
def test_backward_computes_the_activation_again_only_if_it_has_to(
    world: World, recompute: bool, hooks: bool, again: int
) -> None:
    for forward, backward in world.run(2, workers.activation_calls, recompute, hooks):
        assert forward > 0
        assert backward == again * forward


def test_only_a_forward_that_backward_follows_keeps_activations(world: World) -> None:
    for live, computed in world.run(2, workers.live_activations, True):
        assert live == computed > 2
    for live, _ in world.run(2, workers.live_activations, False):
        assert live == 1


def test_frozen_weights(world: World) -> None:
    assert world.run(2, workers.frozen_weight) == [[False, True, True, True]] * 2


def test_frozen_experts_have_no_weight_gradient_pass(world: World) -> None:
    assert world.run(2, workers.frozen_passes) == [["forward", "dgrad"]] * 2


def test_a_second_backward_pass_through_a_retained_graph(world: World) -> None:
    assert world.run(2, workers.second_backward) == [[True] * 6] * 2


def test_wrong_arguments(world: World) -> None:
    for texts in world.run(2, workers.error_messages):
        assert [text.split(":")[0] for text in texts] == ["x", "x", "x", "sent", "sent"]


@pytest.mark.parametrize("options", [None, ExpertOptions(1), ExpertOptions(5, 64, 0.2, fixed_order=True), SERIAL])
def test_options(world: World, options: ExpertOptions | None) -> None:
    world.run(3, workers.compare_with_reference, ExpertCase(options=options, seed=7))


@pytest.mark.long
@pytest.mark.parametrize("experts", [1, 3])
def test_eight_ranks_compute_the_rows_of_two_ranks_in_a_step(experts: int) -> None:
    eight = World(8, sizes=(8,))
    try:
        for kind in get_args(Kind):
            for options in (None, ExpertOptions(fixed_order=True)):
                eight.run(8, workers.compare_with_reference, ExpertCase(kind, experts, options=options))
        for dtype in (torch.float32, torch.bfloat16):
            eight.run(8, workers.compare_rounding, ExpertCase(experts=experts, dtype=dtype, options=None))
    finally:
        eight.close()
