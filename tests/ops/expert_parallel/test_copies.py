"""Experts over copy engines: every order of the queues of all ranks, and overlap with one hardware queue."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops import ExpertOptions, MLPExperts, expert_parallel
from megatron_overlap.ops.call import Projection
from megatron_overlap.ops.expert_parallel.exchange import ExpertPass, Rows
from megatron_overlap.schedules import expert_parallel as schedule
from megatron_overlap.schedules.expert_parallel import Segments, expert_plan
from tests.comm.copy_engines import EngineBackend
from tests.comm.copy_protocol import RecordedBackend, RecordedQueue, Recording, explore, ordered, play
from tests.comm.device import Recorder
from tests.comm.makespan import Gpu, Work, makespan
from tests.ops.expert_parallel.workers import Routing

HIDDEN, EXPERTS, GPU = 4, 2, Gpu()


def routings(size: int) -> list[Routing]:
    """Three calls: buffers that grow, a rank without rows, and chunks in several parts."""
    draw = random.Random(size)
    few: Routing = [[[draw.randrange(3) for _ in range(EXPERTS)] for _ in range(size)] for _ in range(size)]
    to_first: Routing = [[[5 * (to == 0), 0] for to in range(size)] for _ in range(size)]
    parts: Routing = [[[70 * (source == 0), 70] for _ in range(size)] for source in range(size)]
    return [few, to_first, parts]


@dataclass
class Recorded:
    """What all ranks enqueue, their results and gradients, and those of the plain program."""

    queues: list[RecordedQueue]
    hardware_queues: list[RecordedQueue]
    results: list[torch.Tensor]
    expected: list[torch.Tensor]


def integers(*shape: int, seed: int) -> torch.Tensor:
    """Sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator).double().requires_grad_()


def activation(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    return hidden * probs[:, None]


def record(calls: list[Routing], device: str = "cpu", *, fixed_order: bool = True) -> Recorded:
    """Records forward and backward of calls of one layer on each rank in turn."""
    size = len(calls[0])
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, size, arenas, device) for rank in range(size)]
    transports = [CopyTransport(backend) for backend in backends]
    shape = size, EXPERTS, 2, HIDDEN, HIDDEN
    weights = integers(*shape, seed=1).detach()
    expected = []
    for number, routing in enumerate(calls):
        tokens = [sum(map(sum, sent)) for sent in routing]
        inputs = [
            [integers(count, HIDDEN, seed=9 * rank + number), integers(count, seed=9 * rank + number + 100)]
            for rank, count in enumerate(tokens)
        ]
        of_all = weights.clone().requires_grad_()
        ys = []
        for (x, probs), sent in zip(inputs, routing, strict=True):
            counts = [count for counts in sent for count in counts]
            pieces = zip(x.split(counts), probs.split(counts), of_all.flatten(0, 1), strict=True)
            ys.append(torch.cat([activation(rows @ w[0].t(), each) @ w[1].t() for rows, each, w in pieces]))
        leaves = [leaf for pair in inputs for leaf in pair]
        *gradients, dw = torch.autograd.grad(ys, [*leaves, of_all], [y.detach() for y in ys])
        for rank in range(size):
            expected += [ys[rank].detach(), *gradients[2 * rank : 2 * rank + 2], *dw[rank].flatten(0, 1)]
    results: list[list[torch.Tensor]] = []
    for rank, transport in enumerate(transports):
        for number, routing in enumerate(calls):
            count = sum(map(sum, routing[rank]))
            x, probs = integers(count, HIDDEN, seed=9 * rank + number), integers(count, seed=9 * rank + number + 100)
            own = [weight.clone().requires_grad_() for weight in weights[rank].flatten(0, 1)]
            experts = MLPExperts(tuple(map(Projection, own[::2])), tuple(map(Projection, own[1::2])), activation)
            with Recording(backends[rank].computing):
                y = expert_parallel(
                    x,
                    probs,
                    routing[rank],
                    [sent[rank] for sent in routing],
                    experts,
                    totals=[[sum(counts) for counts in sent] for sent in routing],
                    group=transport,
                    options=ExpertOptions(parts=2, min_rows=64, fixed_order=fixed_order),
                )
                gradients = torch.autograd.grad(y, [x, probs, *own], y.detach())
            results.append([y.detach(), *gradients])
    found = [tensor for number in range(len(calls)) for each in results[number :: len(calls)] for tensor in each]
    queues = [queue for backend in backends for queue in backend.queues]
    return Recorded(queues, [backend.one_hardware_queue() for backend in backends], found, expected)


@pytest.fixture(params=[6, 2, 1], ids=["alone", "two steps", "one step"])
def max_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most steps of a pass. Groups of up to four ranks have one for each message."""
    monkeypatch.setattr(schedule, "MAX_STEPS", request.param)


def test_every_order_of_a_call() -> None:
    few, to_first, _ = routings(2)
    assert explore(record([few, to_first]).queues, reduced=True) > 100


@pytest.mark.usefixtures("max_steps")
@pytest.mark.parametrize("fixed_order", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_calls_with_other_routings(size: int, fixed_order: bool) -> None:
    ordered(record(routings(size), fixed_order=fixed_order).queues)


@pytest.mark.usefixtures("max_steps")
@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_hardware_queue_has_no_deadlock(size: int) -> None:
    ordered(record(routings(size), "cuda").hardware_queues)


@pytest.mark.usefixtures("max_steps")
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("size", [2, 3])
def test_results_in_a_random_order(size: int, seed: int) -> None:
    recorded = record(routings(size))
    for result in recorded.results:
        result.fill_(float("nan"))
    with torch.no_grad():
        play(recorded.queues, random.Random(seed).randrange)
    for result, expected in zip(recorded.results, recorded.expected, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=0)


def test_notes_of_waits_do_not_add_up() -> None:
    """Each call has waits of its own, because its messages have other sizes."""
    transport = CopyTransport(RecordedBackend(0, 2, {}))  # type: ignore[arg-type]
    routing = routings(2)[0]
    plan = expert_plan(0, routing[0], [sent[0] for sent in routing], totals=[list(map(sum, sent)) for sent in routing])
    tokens = (torch.zeros(plan.num_tokens, HIDDEN),)
    for _ in range(3):
        ExpertPass(transport, plan, "experts", tokens, tokens, serial=False)
    assert transport.waits._num_repeated == 0 < transport.waits._num_once


def _played(size: int, rows: int, hidden: int) -> list[Recorder]:
    """A pass of a layer with two linear layers on the device model of every rank; `rows` of each pair of ranks."""
    devices = []
    counts = [[rows]] * size
    for rank in range(size):
        device = Recorder(rank, size)
        backend: Any = EngineBackend(device, GPU)
        with FakeTensorMode():
            transport = CopyTransport(backend)
            plan = expert_plan(rank, counts, counts, totals=[[rows] * size] * size)
            x, w = (torch.empty(n, hidden, device="cuda", dtype=torch.bfloat16) for n in (plan.num_tokens, hidden))
            tokens, results = (x, torch.empty(plan.num_tokens, device="cuda")), (torch.empty_like(x),)

            def compute(segments: Segments, inputs: Rows, outputs: Rows, w: torch.Tensor = w) -> None:
                torch.mm(torch.mm(inputs[0], w), w, out=outputs[0])

            device.ops.clear()  # the operations of the transport's creation
            with Work(device, GPU):
                expert_pass = ExpertPass(transport, plan, "experts", tokens, results, serial=False)
                expert_pass.run(compute, fixed_order=True)
                expert_pass.expert_rows()
                expert_pass.finish()
        devices.append(device)
    return devices


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_one_hardware_queue_overlaps_as_eight_do(hidden: int) -> None:
    devices = _played(8, 1024, hidden)
    one, eight = (makespan(devices, GPU, connections=number) for number in (1, None))
    work = sum(op.seconds for op in devices[0].ops if op.kind == "work")
    copies = [op.seconds for op in devices[0].ops if op.kind == "copy"]
    # Rows and weights of dispatch, rows of combine: one call in each step, whatever the number of experts.
    assert len(copies) == 2 * 4
    assert one <= 1.05 * eight
    assert one <= 1.05 * max(work, sum(copies)) + max(copies)


def test_experts_over_copies_need_the_counts_of_all_ranks() -> None:
    x, probs, weights = torch.zeros(2, HIDDEN), torch.zeros(2), [Projection(torch.zeros(HIDDEN, HIDDEN))]
    experts = MLPExperts(weights, weights, activation)
    counts = [[1], [1]]
    with pytest.raises(TransportError, match="^expert_parallel: cannot send message 0 .* it lands in no symmetric"):
        expert_parallel(x, probs, counts, counts, experts, group=CopyTransport(RecordedBackend(0, 2, {})))
