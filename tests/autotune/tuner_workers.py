"""What the workers run for test_choice.py: a chooser on layers whose times are made by sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap.autotune import cache, search
from megatron_overlap.autotune.candidates import STOCK, Call, Candidate
from megatron_overlap.autotune.search import calls_to_choose
from megatron_overlap.autotune.tuner import Autotuner
from megatron_overlap.comm import close_transport, transport_of

P2P = Candidate("p2p", "direct", 1)
OTHER = Candidate("p2p", "direct", 2)
SHAPE = (64, 16, 16)


class Seconds(NamedTuple):
    """How long a candidate takes on a rank: forward and backward."""

    forward: float
    backward: float


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, takes: Seconds) -> torch.Tensor:
        ctx.takes = takes
        time.sleep(takes.forward)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.takes.backward)
        return grads[0] * 2, None


class Layers:
    """Calls of one layer of one group, through one chooser."""

    def __init__(
        self, group: dist.ProcessGroup, folder: str | None, possible: Sequence[Candidate] = (P2P, OTHER)
    ) -> None:
        self.group, self.possible = group, possible
        # The rate of loopback depends on what else this machine does: here it is the same link, whatever it does.
        cache._OTHER_LINK = 1e9
        path = None if folder is None else Path(folder, f"rank{group.rank()}")
        self.chooser = Autotuner(group, transport_of(group), folder=path, versions={"release": "1"}, timeout_s=20)
        self.served: list[str] = []

    def run(self, calls: int, takes: Callable[[Candidate], Seconds], micro_batches: int = 1) -> None:
        """Forwards of so many micro-batches, then their backwards, as pipelines do."""
        call = Call("gemm_rs", *SHAPE, "float32", self.group.size())
        w = torch.zeros(2, requires_grad=True)
        for _ in range(calls // micro_batches):
            outputs = []
            for _ in range(micro_batches):
                x = torch.ones(4, requires_grad=True)

                def once(candidate: Candidate, x: torch.Tensor = x) -> torch.Tensor:
                    self.served.append(str(candidate))
                    y: torch.Tensor = _Sleep.apply(x, takes(candidate))
                    # More nodes than one: a view and a sum, as layers with a bias have.
                    return y.view(2, 2) + w

                outputs.append((x, self.chooser.serve(call, once, (x, w), lambda: self.possible)[0]))
            for x, y in reversed(outputs):
                y.sum().backward()
                assert x.grad is not None
                assert torch.equal(x.grad, torch.full((4,), 2.0))


def chosen(
    group: dist.ProcessGroup, micro_batches: int, slow_rank: int | None, calls: int
) -> tuple[list[str], str, float, float]:
    """p2p is faster in forward and much faster in backward; on `slow_rank`, where there is one, far slower."""
    layers = Layers(group, None)

    def takes(candidate: Candidate) -> Seconds:
        if candidate == STOCK:
            return Seconds(0.002, 0.006)
        late = 0.02 if group.rank() == slow_rank else 0.0
        return Seconds(0.003, 0.001 + late) if candidate == P2P else Seconds(0.003, 0.004 + late)

    layers.run(calls, takes, micro_batches)
    (verdict,) = layers.chooser.verdicts()
    close_transport(group)
    return layers.served, str(verdict.candidate), verdict.us, verdict.stock_us


def refined(group: dist.ProcessGroup, folder: str) -> tuple[list[str], list[str], list[str]]:
    """Fused kernels win, and two of their knobs win more; what served, what a new run starts with, what was tried."""

    def takes(candidate: Candidate) -> Seconds:
        if candidate.method != "fused":
            return Seconds(0.008, 0.0)
        helps = {("stores", "staged"), ("tiles", "other")}
        return Seconds(0.004 - 0.0014 * len(helps & {*candidate.knobs}) + 0.002 * len({*candidate.knobs} - helps), 0.0)

    possible = [Candidate("fused"), P2P]
    layers = Layers(group, folder, possible)
    layers.run(calls_to_choose(3, 4), takes)
    (verdict,) = layers.chooser.verdicts()
    again = Layers(group, folder, possible)
    again.run(5, takes)
    close_transport(group)
    return layers.served, again.served, [str(each) for each in verdict.tried]


def withdrawn(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    """p2p is faster until it is not, on one rank alone; then a new run of the same."""
    # These processes run other cases too, and with more ranks.
    with patch.multiple(search, WINDOW=32, FIRST_CHECK=64):
        return _withdrawn(group, folder)


def _withdrawn(group: dist.ProcessGroup, folder: str) -> dict[str, Any]:
    layers = Layers(group, folder)

    def before(candidate: Candidate) -> Seconds:
        # Far apart: beside other tests a sleep is now and then some milliseconds too long.
        return Seconds(0.008, 0.008) if candidate == STOCK else Seconds(0.002, 0.002)

    def after(candidate: Candidate) -> Seconds:
        hit = candidate != STOCK and group.rank() == group.size() - 1
        return Seconds(0.008, 0.024) if hit else before(candidate)

    layers.run(calls_to_choose(3), before)
    first = str(layers.chooser.verdicts()[0].candidate)
    layers.run(120, after)
    (verdict,) = layers.chooser.verdicts()
    again = Layers(group, folder)
    again.run(5, after)
    kept_by = [path.parent.name for path in Path(folder).glob("*/*.json")]
    close_transport(group)
    return {
        "first": first,
        "now": str(verdict.candidate),
        "why": verdict.why,
        "withdrawals": verdict.withdrawals,
        "served": layers.served,
        "next run": again.served,
        "kept by": kept_by,
    }


def told_by_others(group: dist.ProcessGroup, folder: str) -> tuple[list[str], list[str]]:
    """Rank 0 has kept one choice, every other rank another one: what serves, and who wrote."""
    first = Layers(group, folder)
    first.run(calls_to_choose(3), lambda candidate: Seconds(0.004, 0.0) if candidate == STOCK else Seconds(0.0, 0.0))
    own = Path(folder, f"rank{group.rank()}")
    if group.rank():
        own.mkdir()
        (source,) = Path(folder, "rank0").glob("*.json")
        text = source.read_text().replace('"method": "p2p"', '"method": "megatron"')
        assert "megatron" in text
        (own / source.name).write_text(text)
    dist.barrier(group)
    again = Layers(group, folder)
    again.run(5, lambda candidate: Seconds(0.0, 0.0))
    close_transport(group)
    return first.served[-1:], again.served
