"""Worker functions of test_tuner.py: an autotuner on layers that take known times on a clock of their own."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap.autotune import search, tuner
from megatron_overlap.autotune.candidates import STOCK, Call, Candidate
from megatron_overlap.autotune.search import Search, Selection, calls_to_select
from megatron_overlap.autotune.tuner import Autotuner
from tests.autotune.trials import Clock

P2P = Candidate("p2p", "direct", 1)
OTHER = Candidate("p2p", "direct", 2)
SHAPE = (64, 16, 16)


class Seconds(NamedTuple):
    """The time of a candidate on a rank, forward and backward."""

    forward: float
    backward: float


class _Taking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, takes: Seconds, clock: Clock) -> torch.Tensor:
        ctx.takes, ctx.clock = takes, clock
        clock.advance(takes.forward)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ctx.clock.advance(ctx.takes.backward)
        return grads[0] * 2, None, None


class Layers:
    """Calls of one layer of one group, through one autotuner."""

    def __init__(
        self, group: dist.ProcessGroup, folder: str | None, candidates: Sequence[Candidate] = (P2P, OTHER)
    ) -> None:
        self.group, self.candidates = group, [STOCK, *candidates]
        path = None if folder is None else Path(folder, f"rank{group.rank()}")
        self.autotuner = Autotuner(group, folder=path, versions={"release": "1"}, timeout_s=20)
        self.ran: list[str] = []
        self._clock = Clock()

    def run(self, calls: int, takes: Callable[[Candidate], Seconds], micro_batches: int = 1) -> None:
        """Runs the forwards of so many micro-batches, then their backwards, as pipelines do."""
        call = Call("gemm_rs", *SHAPE, "float32")
        w = torch.zeros(2, requires_grad=True)
        for _ in range(calls // micro_batches):
            outputs = []
            with self._clock.of_tuner():
                for _ in range(micro_batches):
                    x = torch.ones(4, requires_grad=True)

                    def once(candidate: Candidate, x: torch.Tensor = x) -> torch.Tensor:
                        self.ran.append(str(candidate))
                        y: torch.Tensor = _Taking.apply(x, takes(candidate), self._clock)
                        # Several nodes: a view and a sum, as in a layer with a bias.
                        return y.view(2, 2) + w

                    outputs.append((x, self.autotuner.run(call, once, (x, w), lambda: self.candidates)[0]))
                for x, y in reversed(outputs):
                    y.sum().backward()
                    assert x.grad is not None
                    assert torch.equal(x.grad, torch.full((4,), 2.0))

    def run_until(self, takes: Callable[[Candidate], Seconds], done: Callable[[Search[Candidate]], bool]) -> None:
        """Runs calls until `done`, which is equal on all ranks, at most a thousand."""
        for _ in range(50):
            self.run(20, takes)
            if done(self.search):
                return

    @property
    def search(self) -> Search[Candidate]:
        """The search of the only kind of call."""
        (kind,) = self.autotuner.kinds.values()
        return kind.search

    @property
    def selected(self) -> Selection[Candidate]:
        """The selection of the only kind of call."""
        return self.search.selected


def selected(
    group: dist.ProcessGroup, micro_batches: int, slow_rank: int | None, calls: int
) -> tuple[list[str], str, float, float]:
    """p2p is slower in forward and much faster in backward. On `slow_rank` it is far slower."""
    layers = Layers(group, None)

    def takes(candidate: Candidate) -> Seconds:
        if candidate == STOCK:
            return Seconds(0.002, 0.006)
        late = 0.02 if group.rank() == slow_rank else 0.0
        return Seconds(0.003, 0.001 + late) if candidate == P2P else Seconds(0.003, 0.004 + late)

    layers.run(calls, takes, micro_batches)
    found = layers.selected
    return layers.ran, str(found.candidate), found.us, found.stock_us


def refined(group: dist.ProcessGroup, folder: str) -> tuple[list[str], list[str], list[str]]:
    """Fused kernels win, and two of their knobs win more.

    Returns:
        What ran, what a new run starts with, and which candidates were measured.
    """

    def takes(candidate: Candidate) -> Seconds:
        if candidate.method != "fused":
            return Seconds(0.008, 0.0)
        helpful = {("stores", "staged"), ("tiles", "other")}
        gained, lost = len(helpful & {*candidate.knobs}), len({*candidate.knobs} - helpful)
        return Seconds(0.004 - 0.0014 * gained + 0.002 * lost, 0.0)

    candidates = [Candidate("fused"), P2P]
    layers = Layers(group, folder, candidates)
    layers.run(calls_to_select(3, 4), takes)
    (kind,) = layers.autotuner.kinds.values()
    again = Layers(group, folder, candidates)
    again.run(5, takes)
    return layers.ran, again.ran, [str(each) for each in kind.search.tried]


class Reverted(NamedTuple):
    """The selections of a run whose candidate turned slower, what ran, and what a new run of the same starts with."""

    first: str
    last: Selection[Candidate]
    ran: list[str]
    next_run: list[str]
    writers: set[str]


def reverted(group: dist.ProcessGroup, folder: str) -> Reverted:
    """p2p is faster until it turns slower, on one rank alone."""
    # These worker processes run other tests too.
    with patch.multiple(search, FIRST_RECHECK=64):
        layers = Layers(group, folder)

        def before(candidate: Candidate) -> Seconds:
            seconds = 0.008 if candidate == STOCK else 0.002 if candidate == P2P else 0.005
            return Seconds(seconds, seconds)

        def after(candidate: Candidate) -> Seconds:
            slow = candidate != STOCK and group.rank() == group.size() - 1
            return Seconds(0.008, 0.024) if slow else before(candidate)

        layers.run_until(before, lambda search: not search.measuring)
        first = str(layers.selected.candidate)
        layers.run_until(after, lambda search: search.selected.reason == "reverted")
        again = Layers(group, folder)
        again.run(5, after)
        writers = {path.parent.name for path in Path(folder).glob("*/*.json")}
        return Reverted(first, layers.selected, layers.ran, again.ran, writers)


def other_rows_in_each_call(group: dist.ProcessGroup) -> tuple[int, list[str], str]:
    """Returns the number of kinds, what ran after the last one, and what an allowed `block` ran."""
    layers = Layers(group, None)
    w = torch.zeros(2, requires_grad=True)

    def run(op: str, rows: int, modelled: Candidate | None = None) -> str:
        call = Call(op, rows, 16, 16, "float32")
        candidates = [STOCK, P2P]
        return str(layers.autotuner.run(call, lambda _: w * 2, (w, w), lambda: candidates, modelled=modelled)[1])

    with patch.multiple(tuner, MAX_KINDS=3):
        later = [run("gemm_rs", rows) for rows in range(20)][3:]
        later.append(run("gemm_rs", 20, P2P))
        block = run("block", 0, P2P)
    return len(layers.autotuner.kinds), later, block


def other_disks(group: dist.ProcessGroup, folder: str) -> tuple[list[str], list[str]]:
    """Rank 0 has one selection in its cache, every other rank another one.

    Returns:
        What ran last in the first run, and what runs in the second one.
    """
    first = Layers(group, folder)
    first.run(calls_to_select(3), lambda candidate: Seconds(0.001 if candidate == P2P else 0.004, 0.0))
    dist.barrier(group)
    own = Path(folder, f"rank{group.rank()}")
    if group.rank():
        own.mkdir()
        (source,) = Path(folder, "rank0").glob("*.json")
        text = source.read_text()
        assert '"candidate": "p2p' in text
        (own / source.name).write_text(json.dumps(json.loads(text) | {"candidate": "stock"}))
    dist.barrier(group)
    again = Layers(group, folder)
    again.run(5, lambda candidate: Seconds(0.001, 0.0))
    return first.ran[-1:], again.ran
