"""An MLP by parts of its rows equals its two layers, forward and backward, and keeps no more."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import mlp_workers as cases

PLAN = LinearPlan(chunks_per_rank=3)


@pytest.mark.parametrize("late", [False, True], ids=["gloo", "late"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_equals_reference(world: World, num_ranks: int, dtype: torch.dtype, late: bool) -> None:
    assert_same(world.run(num_ranks, cases.against_reference, 61, dtype, PLAN, late=late))


@pytest.mark.parametrize("pattern", ["direct", "serial"])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_few_rows_and_other_orders(world: World, rows: int, pattern: str) -> None:
    plan = LinearPlan(pattern=pattern, chunks_per_rank=4, add_in_place=True)  # type: ignore[arg-type]
    assert_same(world.run(4, cases.against_reference, rows, torch.float32, plan, late=True))


@pytest.mark.parametrize("deferred_wgrad", [False, True])
@pytest.mark.parametrize("main_grad", [False, True])
def test_weight_gradients_go_where_they_should(world: World, main_grad: bool, deferred_wgrad: bool) -> None:
    world.run(
        2,
        cases.against_reference,
        40,
        torch.float32,
        PLAN,
        late=True,
        main_grad=main_grad,
        deferred_wgrad=deferred_wgrad,
    )


def test_activation_recomputation(world: World) -> None:
    world.run(2, cases.against_reference, 40, torch.float32, PLAN, late=True, deferred_wgrad=True, checkpoint=True)


def test_a_part_goes_through_both_layers_before_the_next(world: World) -> None:
    """Parts of 64 rows: 1, 2, 2, 1 shares, the first and the last in two pieces; then each layer's backward, whole."""
    sent = {"forward": (32 + 32) * cases.H * 4, "dgrad": (32 + 32) * cases.K * 4}
    for did in world.run(2, cases.order):
        rows = [int(text.split()[0]) for text in did if text.endswith("rows")]
        assert sum(rows) == 64
        assert len(rows) == 6
        passes = [text for text in did if not text.endswith("rows")]
        assert passes == [
            "first forward 0",
            f"second forward {sent['forward']}",
            *("second dgrad 0", "second wgrad 0"),
            *(f"first dgrad {sent['dgrad']}", "first wgrad 0"),
        ]


@pytest.mark.parametrize("which", range(4), ids=["x", "w1", "w2", "bias"])
def test_frozen(world: World, which: int) -> None:
    assert world.run(2, cases.frozen, which) == [[number != which for number in range(4)]] * 2


def test_keeps_no_more_than_the_layers(world: World) -> None:
    for by_parts, by_layers in world.run(2, cases.kept_bytes):
        assert by_parts <= by_layers


def test_what_does_not_fit_is_refused(world: World) -> None:
    messages = world.run(2, cases.refused)
    assert_same(messages)
    assert [text.split(":")[0] for text in messages[0]] == ["x", "x", "pattern"]
