"""The autotuner on real ranks whose candidates take known times: timing, agreement, cache and reverting."""

from __future__ import annotations

import functools
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_overlap.autotune import tuner
from megatron_overlap.autotune.search import calls_to_select
from tests.autotune import tuner_workers as workers
from tests.helpers.world import World, assert_same


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_forward_and_backward_count_together(world: World, micro_batches: int) -> None:
    answers = world.run(2, workers.selected, micro_batches, None, calls_to_select(3))
    assert_same([ran for ran, *_ in answers])
    for _, method, us, stock_us in answers:
        assert method == "p2p direct x 1", "the faster backward outweighs the slower forward"
        assert us == pytest.approx(4000, abs=10)
        assert stock_us == pytest.approx(8000, abs=10)


def test_a_candidate_that_is_slow_on_one_rank_is_not_selected_on_any(world: World) -> None:
    for slow in (0, 2):
        answers = world.run(3, workers.selected, 1, slow, calls_to_select(3))
        assert_same([ran for ran, *_ in answers])
        assert [method for _, method, _, _ in answers] == ["stock"] * 3


def test_variants_of_the_fused_kernels_are_measured_where_these_win(world: World, tmp_path: Path) -> None:
    answers = world.run(2, workers.refined, str(tmp_path))
    assert_same(answers)
    ran, again, tried = answers[0]
    best = "fused stores=staged tiles=other"
    assert ran[-20:] == [best] * 20
    assert again == [best] * 5, "the cache has it"
    assert {"fused", "p2p direct x 1", "fused spare_sms=8", "fused mover=pull", best} <= {*tried}
    assert not any("ring" in each or "chunk_rows" in each for each in tried), "they change nothing here"


def test_a_candidate_that_turns_slower_is_reverted_on_all_ranks_and_in_the_next_run(
    world: World, tmp_path: Path
) -> None:
    answers = world.run(2, workers.reverted, str(tmp_path))
    assert_same([answer.ran for answer in answers])
    for answer in answers:
        assert answer.first.startswith("p2p")
        assert (str(answer.last.candidate), answer.last.reason) == ("stock", "reverted")
        assert answer.next_run == ["stock"] * 5
        assert answer.writers == {"rank0"}


def test_the_cache_of_other_ranks_makes_no_difference(world: World, tmp_path: Path) -> None:
    answers = world.run(3, workers.other_disks, str(tmp_path))
    assert_same(answers)
    last, again = answers[0]
    assert last[0].startswith("p2p")
    assert again == last * 5


def test_rows_that_change_in_each_call_add_kinds_up_to_a_limit(world: World) -> None:
    later = ["stock"] * 17 + ["p2p direct x 1"]
    assert world.run(2, workers.other_rows_in_each_call) == [(4, later, "p2p direct x 1")] * 2


class _Deferring(torch.autograd.Function):
    """Computes for a while in backward, and for longer at the end of the pass, as deferred weight gradients do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        time.sleep(0.002)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: time.sleep(0.02))
        return grads[0] * 2


def test_a_whole_pass_includes_what_runs_at_its_end() -> None:
    x = torch.ones(4, requires_grad=True)
    samples: tuner.Samples = ([], [])
    for end in ("pass", "nodes", "nodes"):
        tuner._time_call(samples, lambda: _Deferring.apply(x), (x,), end).sum().backward()
    whole, node, _ = (span.us() for span in samples[1])
    assert whole >= 22_000
    assert 2_000 <= node < whole


@pytest.mark.parametrize("end", ["nodes", "input", "pass"])
def test_a_call_whose_input_requires_no_gradient_is_timed(end: tuner.End) -> None:
    """As of the first layer that trains."""
    x, weight = torch.randn(4, 4), torch.randn(4, 4, requires_grad=True)
    samples: tuner.Samples = [], []
    tuner._time_call(samples, lambda: x @ weight, (x,), end).sum().backward()
    assert [len(each) for each in samples] == [1, 1]
    assert samples[1][0].stop is not None


@pytest.mark.parametrize("end", ["nodes", "input", "pass"])
def test_a_timed_call_keeps_no_tensor(end: tuner.End) -> None:
    """Not even in a cycle: the garbage collector sees none that includes a node of the graph."""
    weight = torch.randn(4, 4, requires_grad=True)
    x = torch.randn(4, 4, requires_grad=True) * 2
    freed = weakref.ref(x)
    tuner._time_call(([], []), functools.partial(torch.matmul, x, weight), (x, weight), end).sum().backward()
    del x
    assert freed() is None
