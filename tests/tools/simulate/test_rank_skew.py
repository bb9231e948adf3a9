"""Rank skew at synchronization points."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import LinearOverlap
from megatron_overlap.tools.simulate.passes import Op, with_rank_skew
from megatron_overlap.tools.simulate.step import simulate_step
from tests.tools.simulate.machines import LATE_AFTER_US, job, machine


def test_skew_grows_with_the_computation_since_the_last_synchronization() -> None:
    ops = (
        Op("gather", 30.0, tensor_us=10.0, sync="before"),
        Op("alone", 5.0),
        Op("scatter", 40.0, tensor_us=30.0, context_us=1.0, sync="after"),
        Op("after", 3.0),
    )
    made = with_rank_skew(ops, lambda computed_us: computed_us / 100)
    # 3 are left from the pass before; then 20, 5 and 9 until the second wait.
    assert [op.tensor_us for op in made.ops] == pytest.approx([10.03, 0.0, 30.34, 0.0])
    assert made.time_us == pytest.approx(78.37)
    assert made.context_us == 1.0
    assert [op.computed_us for op in made.ops] == pytest.approx([20.0, 5.0, 9.0, 3.0])


def test_slack_reduces_the_skew() -> None:
    ops = tuple(Op(name, 10.0, sync="before", slack_us=slack) for name, slack in (("a", 0.0), ("b", 3.0), ("c", 9.0)))
    made = with_rank_skew(ops, lambda computed_us: 5.0)
    assert [op.time_us for op in made.ops] == pytest.approx([15.0, 12.0, 10.0])
    assert [op.tensor_us for op in made.ops] == pytest.approx([5.0, 2.0, 0.0])


def test_no_synchronization_has_no_skew() -> None:
    ops = (Op("a", 5.0), Op("b", 3.0, context_us=1.0))
    assert with_rank_skew(ops, lambda computed_us: 100.0).ops == ops


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_the_skew_of_a_layer_follows_its_computation(sequence_parallel: bool) -> None:
    whole = job(tensor=2, sequence_parallel=sequence_parallel, num_attention_heads=2)
    for name in ("forward", "backward"):
        on_time, late = (getattr(Layers(whole, machine(tflops=10.0, late_us=each)), name) for each in (0.0, 7.0))
        computed = sum(op.computed_us for op in on_time.ops)
        assert late.time_us - on_time.time_us == pytest.approx(7.0 * computed / LATE_AFTER_US)
        assert late.tensor_us - on_time.tensor_us == pytest.approx(late.time_us - on_time.time_us)
        # Each way one for every linear layer, or where it is summed up.
        assert sum(op.sync is not None for op in late.ops) == (4 if sequence_parallel else 2)


def test_replicas_synchronize_once_per_step() -> None:
    for data, times in ((1, 0), (2, 1)):
        on_time, late = (simulate_step(job(data=data), machine(memory_gbps=0.1, late_us=each)) for each in (0.0, 7.0))
        updated = on_time.optimizer_us
        assert late.step_us - on_time.step_us == pytest.approx(times * 7.0 * updated / LATE_AFTER_US)


def test_recomputation_adds_no_second_skew() -> None:
    given = job(tensor=2, tensor_overlap=LinearOverlap("stock"))
    kept, again = (
        Layers(replace(given, recompute=recompute), machine(late_us=7.0)).backward for recompute in ("none", "full")
    )
    forward = Layers(given, machine(late_us=7.0)).forward
    assert again.time_us == pytest.approx(kept.time_us + forward.time_us)
