"""Balanced attention on the device model: no deadlock with one hardware queue; overlap over copy engines."""

from __future__ import annotations

import copy
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm import BufferPool, TransportOptions, nccl
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import flash_attention
from megatron_overlap.ops.call import unobserved
from megatron_overlap.ops.varlen.attention import _BalancedAttention, _rebalances
from megatron_overlap.ops.varlen.layout import Rows, _Transfers
from megatron_overlap.ops.varlen.ring import CallOptions, VarlenTransports
from megatron_overlap.schedules.varlen import Plan, Topology, messages
from megatron_overlap.schedules.varlen.messages import Traffic, messages_of, received_rows
from megatron_overlap.schedules.varlen.ring_groups import Passing
from tests.comm.copy_engines import EngineBackend
from tests.comm.device import Recorder
from tests.comm.makespan import Work, makespan
from tests.ops.tensor_parallel.device_layers import GPU, Context, times
from tests.ops.varlen.test_attention import SLOW, one_pass

HEADS, KV_HEADS, SIZE = 32, 8, 128


@pytest.fixture(autouse=True, scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    """The bounds of documents need no pinned memory, which needs a driver."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            flash_attention, "_cu_seqlens", lambda lengths, device: torch.empty(len(lengths) + 1, device=device)
        )
        yield patch


Transports = Callable[[Recorder], VarlenTransports]


def copies(device: Recorder) -> VarlenTransports:
    """Copies inside one node."""
    backend: Any = EngineBackend(device, GPU)
    return VarlenTransports(*[CopyTransport(backend)] * 3)


def record(
    plan: Plan, passing: Passing, *, linear: bool, transports: Transports = copies
) -> tuple[list[Recorder], list[Recorder]]:
    """Forward and backward on the device model of every rank."""
    forward, backward = [], []
    for rank in range(plan.topology.ranks):
        device = Recorder(rank, plan.topology.ranks)
        with FakeTensorMode():
            opened = transports(device)
            rebalances = _rebalances(plan, 0) if linear else None
            rows = (plan.tokens(0) if rebalances is None else rebalances[0].before)[rank]
            options = CallOptions(opened, plan, 0, 1.0, passing, rebalances, unobserved)
            counts = HEADS, KV_HEADS, KV_HEADS, HEADS
            q, k, v, dy = (torch.empty(rows, heads, SIZE, device="cuda", dtype=torch.bfloat16) for heads in counts)
            context: Any = Context()
            with Work(device, GPU):
                _BalancedAttention.forward(context, q, k, v, options)
                forward.append(copy.copy(device))
                device.ops = []
                _BalancedAttention.backward(context, dy)
        backward.append(device)
    return forward, backward


@pytest.mark.parametrize("passing", ["kv", "q"])
@pytest.mark.parametrize(
    ("method", "lengths", "linear"),
    [("balanced", [65536, 9001, 300], False), ("ring", [30001, 20000], True), ("packing", [20000, 9000, 3000], True)],
)
def test_overlap(method: str, lengths: list[int], linear: bool, passing: Passing) -> None:
    spare = max(lengths) if method == "packing" else 0
    for devices in record(one_pass(lengths, Topology(1, 4), spare, method), passing, linear=linear):
        took = times(devices)
        assert took.one <= took.bound, took
        assert took.eight <= took.bound, took


def nccl_over_nodes(monkeypatch: pytest.MonkeyPatch) -> Transports:
    """NCCL, with a communicator of their own for rings inside nodes and between nodes."""
    group: Any = SimpleNamespace()

    def transports(device: Recorder) -> VarlenTransports:
        monkeypatch.setattr(nccl, "torch", device.torch)
        monkeypatch.setattr(nccl, "dist", device.dist)
        monkeypatch.setattr(nccl, "store_beside", lambda group: None)
        channels = (TransportOptions(channel=each, timeout_s=5) for each in ("", "intra", "rebalance"))
        return VarlenTransports(*(nccl.NcclTransport(group, each) for each in channels))

    return transports


LENGTHS = [2000, 40000, 20000, 300, 300, 9000, 40000, 20000]


@pytest.mark.parametrize("passing", ["kv", "q"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) if seed else seed for seed in range(8)])
def test_nccl_over_nodes_has_no_deadlock(monkeypatch: pytest.MonkeyPatch, seed: int, passing: Passing) -> None:
    """Ranks share several rings inside nodes and between nodes."""
    draw = random.Random(seed)
    lengths = draw.choices(LENGTHS, k=draw.randrange(3, 9)) if seed else LENGTHS
    plan = one_pass(lengths, Topology(2, 4 if seed else 2))
    if not seed:
        assert {ring.zone for ring in plan.passes[0].rings} == {"inter", "intra"}
    for devices in record(plan, passing, linear=bool(seed % 3), transports=nccl_over_nodes(monkeypatch)):
        for connections in (1, None):
            makespan(devices, GPU, connections=connections)


@pytest.mark.long
@pytest.mark.parametrize("passing", ["kv", "q"])
@pytest.mark.parametrize("topology", [Topology(2, 3, 3), Topology(3, 2, 2), Topology(4, 2, 2)], ids=lambda of: of.nodes)
def test_several_rings_through_proxies_have_no_deadlock(
    monkeypatch: pytest.MonkeyPatch, topology: Topology, passing: Passing
) -> None:
    plan = one_pass([40000, 40000, 2000, 9000, 40000, 20000], topology)
    groups = messages_of(plan, 0, Traffic(passing, 4096, 8192))
    routed = [any(not message.is_final for message in group.distribute.messages) for group in groups]
    assert sum(routed) >= 2
    for devices in record(plan, passing, linear=False, transports=nccl_over_nodes(monkeypatch)):
        for connections in (1, None):
            makespan(devices, GPU, connections=connections)


class Proxied(NamedTuple):
    """A forward and a backward whose ranks share messages between nodes, and how they marked their results ready."""

    plan: Plan
    directions: tuple[list[Recorder], list[Recorder]]
    traffic: list[Traffic]  # of both directions
    marked: list[list[int]]


@pytest.fixture(scope="module", params=["kv", "q"])
def proxied(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch) -> Iterator[Proxied]:
    marked = defaultdict[nccl.NcclP2PWork, list[int]](list)
    original = nccl.NcclP2PWork.mark_ready

    def mark_ready(self: nccl.NcclP2PWork, work_done: int) -> None:
        marked[self].append(work_done)
        original(self, work_done)

    plan = one_pass([9000, 40000], Topology(2, 3, 3, **SLOW))
    assert {ring.zone for ring in plan.passes[0].rings} == {"inter", "intra"}
    with patch.context() as recording:
        recording.setattr(nccl.NcclP2PWork, "mark_ready", mark_ready)
        recording.setattr(messages, "_recent_traffic", deque(maxlen=2))
        directions = record(plan, request.param, linear=False, transports=nccl_over_nodes(recording))
        yield Proxied(plan, directions, list(messages._recent_traffic), list(marked.values()))


def test_results_through_proxies_have_no_deadlock(proxied: Proxied) -> None:
    """Proxies enqueue inter-node results that they forward before intra-node results of their own."""
    for devices in proxied.directions:
        makespan(devices, GPU, connections=1)


def test_one_call_of_nccl_carries_the_messages_of_a_round(proxied: Proxied) -> None:
    """Ring groups share the calls, and so do the shares of a transfer over several network cards."""
    for devices, traffic in zip(proxied.directions, proxied.traffic, strict=True):
        groups = messages_of(proxied.plan, 0, traffic)
        routed = [message for group in groups for message in group.distribute.messages if not message.is_final]
        assert routed
        for rank, device in enumerate(devices):
            calls = sum(op.kind == "messages" for op in device.ops)
            rounds = {
                (collects or group.ring_group.zone, each.messages[index].round)
                for group in groups
                for collects, each in enumerate((group.distribute, group.collect))
                if each is not None
                for index in each.of(rank)
            }
            assert calls == len(rounds)


def test_results_become_ready_in_the_order_of_their_numbers(proxied: Proxied) -> None:
    """`mark_ready(n)` allows the first n sends: a rank completes the results of its ring groups in that order."""
    assert max(map(len, proxied.marked)) > 3
    for numbers in proxied.marked:
        assert numbers == list(range(len(numbers)))


def test_both_ranks_number_a_message_alike() -> None:
    """By the number gloo finds the other end of a message, and a trace its sender."""
    plan = one_pass(LENGTHS, Topology(2, 4, 4))
    groups = messages_of(plan, 0, Traffic("kv", 4096, 0))
    places, num_rows = received_rows(tuple(enumerate(groups)), plan.topology.ranks, results=False)
    sent = {
        (number, index, 0): slice(0, payload.rows[0])
        for number, group in enumerate(groups)
        for index, payload in enumerate(group.payloads)
    }
    own, sends, receives = torch.empty(max(plan.lengths), 1), list[object](), list[object]()
    for rank in range(plan.topology.ranks):
        transport: Any = SimpleNamespace(rank=rank, size=8, buffer_pool=BufferPool(), prepares=False)
        rows = Rows(torch.empty(num_rows[rank], 1), places)
        plans = {number: group.distribute for number, group in enumerate(groups)}
        for each in _Transfers(transport, plans, sent, rows, {}, "test").build(own):
            message = each.message
            if each.send.numel():
                sends.append((rank, message.to, message.tag, each.send.shape))
            else:
                receives.append((message.source, rank, message.tag, each.recv.shape))
    assert set(sends) == set(receives)
    assert len(set(sends)) == len(sends) == len(receives)
