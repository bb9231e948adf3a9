"""Functions that the workers run in tests of the consistency check, heartbeats and failed waits."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_overlap.comm import TransportError, TransportOptions, Transports
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import store_beside
from megatron_overlap.comm.transport import OrderedTransport, Transfer
from megatron_overlap.diagnostics.consistency import compare
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.diagnostics.heartbeat import Heartbeat
from megatron_overlap.ops import MLPExperts, all_gather_linear, expert_parallel
from megatron_overlap.ops.call import Projection
from megatron_overlap.schedules import all_gather_plan


def compares(group: dist.ProcessGroup, facts_of: list[dict[str, str] | None], deadline_s: float) -> tuple[str, float]:
    """Rank r publishes `facts_of[r]`, or nothing if it is None: return the differences and the seconds taken."""
    rank = dist.get_rank(group)
    store, facts = store_beside(group), facts_of[rank]
    start = time.perf_counter()
    found = "" if facts is None else compare(store, rank, list(range(group.size())), "t", facts, deadline_s)
    took = time.perf_counter() - start
    dist.barrier(group)
    return found, took


def heartbeats(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the state of rank 1 that rank 0 observes: running, stopped, and after a published failure."""
    rank = dist.get_rank(group)
    heartbeat = Heartbeat(store_beside(group), rank, 2.0, lambda: f"at step {7 + rank}")
    heard = {"never": heartbeat.state_of(9)}
    dist.barrier(group)
    if rank == 0:
        heard["alive"] = heartbeat.state_of(1)
    dist.barrier(group)
    if rank == 1:
        heartbeat.close()
    dist.barrier(group)
    if rank == 0:
        heard["silent"] = heartbeat.state_of(1)
    dist.barrier(group)
    if rank == 1:
        heartbeat.publish_failure("the wait failed")
    dist.barrier(group)
    if rank == 0:
        heard["failed"] = heartbeat.state_of(1)
        heartbeat.close()
    left = sum(thread.name == "megatron_overlap_heartbeat" for thread in threading.enumerate())
    assert left == 0
    return heard


class Layer(torch.nn.Module):
    """A column-parallel linear on the op."""

    def __init__(self, transport: object) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4, 8))
        self.transport = transport

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_gather_linear(x, self.weight, group=self.transport)  # type: ignore[arg-type]


class Experts(torch.nn.Module):
    """Two ranks with one expert each, on the op; the weights have the names of TransformerEngine's grouped experts."""

    def __init__(self, transport: GlooTransport) -> None:
        super().__init__()
        self.weight0 = torch.nn.Parameter(torch.ones(8, 8))
        self.transport = transport

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (Projection(self.weight0, None, None),)
        experts = MLPExperts(layers, layers, lambda hidden, probs: hidden * probs[:, None])
        rows = [1 + (rank != self.transport.rank) for rank in range(2)]  # to each rank, and from it
        counts = [[count] for count in rows]
        return expert_parallel(x, torch.ones(3), counts, counts, experts, group=self.transport)


def failed_wait(
    group: dist.ProcessGroup, folder: str, backward: bool, experts: bool
) -> tuple[str, dict[str, object], str]:
    """Rank 1 skips an operation of rank 0: return the error, the content of the file and the error of a second wait."""
    run = SimpleNamespace(step=5, folder=Path(folder))
    flight_recorder = FlightRecorder(dist.get_rank(group), run, {"version of x": "1"})
    transport = GlooTransport(group, TransportOptions(timeout_s=1.0, flight_recorder=flight_recorder))
    flight_recorder.heartbeat = Heartbeat(store_beside(group), dist.get_rank(group), 1.0, flight_recorder.doing)
    kind: type[Experts | Layer] = Experts if experts else Layer
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.Linear(2, 2), kind(transport)])})
    x = torch.ones(3, 8, requires_grad=True)
    texts, content = ["", ""], {}
    if backward or transport.rank == 0:
        try:
            y = model["layers"][1](x)  # type: ignore[index]
            run.step = 6
            if transport.rank == 0:
                y.sum().backward()
        except TransportError as error:
            texts[0] = str(error)
            content = json.loads((Path(folder) / "overlap-failure-rank0.json").read_text())
        if transport.rank == 0:
            start = time.perf_counter()
            try:
                model["layers"][1](x)  # type: ignore[index]
            except TransportError as error:
                texts[1] = str(error)
            assert time.perf_counter() - start < 0.5, "a wait on a broken transport blocked"
    dist.barrier(group)
    flight_recorder.close()
    transport.close()
    return texts[0], content, texts[1]


def a_dead_thread(group: dist.ProcessGroup) -> tuple[str, float]:
    """Wait after the receiving threads have ended: return the error and the seconds taken."""
    from megatron_overlap.comm import gloo

    transport = GlooTransport(group, TransportOptions(timeout_s=0.2))
    gloo._GRACE_S = 0.3
    for queue in transport._receivers.values():
        queue.put(None)
    plan = all_gather_plan(2, transport.rank)
    transfers = [Transfer(message, torch.zeros(4), torch.zeros(4)) for message in plan.messages]
    p2p_work = transport.begin(transfers, "all_gather_linear")
    start, text = time.perf_counter(), ""
    try:
        p2p_work.wait(0)
    except TransportError as error:
        text = str(error)
    took = time.perf_counter() - start
    gloo._GRACE_S = 5.0
    dist.barrier(group)
    transport.close()
    return text, took


def peer_that_never_connects(group: dist.ProcessGroup) -> str:
    """Rank 1 opens no transport: return the error of rank 0."""
    text = ""
    if dist.get_rank(group) == 0:
        try:
            GlooTransport(group, TransportOptions(timeout_s=1.0))
        except TransportError as error:
            text = str(error)
    else:
        store_beside(group)
    dist.barrier(group)
    return text


def bits(group: dist.ProcessGroup, ordered: bool, late_s: list[float]) -> tuple[list[int], bool]:
    """Run a bf16 operation on ranks that start at different times; return hashes, and whether messages may complete."""
    rank = dist.get_rank(group)
    transports = Transports()
    transport = transports.open(group, TransportOptions(ordered=ordered))
    reports_completion = not isinstance(transport, OrderedTransport)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(96, 40, generator=generator).bfloat16().requires_grad_()
    w = torch.randn(24, 40, generator=generator).bfloat16().requires_grad_()
    from megatron_overlap.ops import LinearPlan

    time.sleep(late_s[rank])
    y = all_gather_linear(x, w, group=transport, plan=LinearPlan(pattern="direct", chunks_per_rank=4))
    time.sleep(late_s[rank])
    y.backward(torch.randn(y.shape, generator=generator).bfloat16())
    assert x.grad is not None
    assert w.grad is not None
    dist.barrier(group)
    transports.close()
    return [hash(t.detach().float().numpy().tobytes()) for t in (y, x.grad, w.grad)], reports_completion
