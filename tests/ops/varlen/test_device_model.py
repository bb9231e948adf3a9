"""Balanced attention over copy engines on the device model: no deadlock with one hardware queue, and overlap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.ops import flash_attention
from megatron_overlap.ops.varlen.attention import _BalancedAttention, _rebalances
from megatron_overlap.ops.varlen.ring import CallOptions, VarlenTransports
from megatron_overlap.schedules.varlen import Plan, Topology
from megatron_overlap.schedules.varlen.ring_groups import Passing
from tests.comm.copy_engines import EngineBackend
from tests.comm.device import Recorder
from tests.comm.makespan import Work
from tests.ops.tensor_parallel.device_layers import GPU, Context, times
from tests.ops.varlen.test_attention import one_pass

HEADS, KV_HEADS, SIZE = 32, 8, 128


@pytest.fixture(autouse=True)
def without_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bounds of documents, which need a driver."""
    monkeypatch.setattr(
        flash_attention, "_cu_seqlens", lambda lengths, device: torch.empty(len(lengths) + 1, device=device)
    )


def record(plan: Plan, passing: Passing, *, linear: bool, backward: bool) -> list[Recorder]:
    """One pass on the device model of every rank."""
    devices = []
    for rank in range(plan.topology.ranks):
        device = Recorder(rank, plan.topology.ranks)
        backend: Any = EngineBackend(device, GPU)
        with FakeTensorMode():
            transport = CopyTransport(backend)
            rebalances = _rebalances(plan, 0) if linear else None
            rows = (plan.tokens(0) if rebalances is None else rebalances[0].before)[rank]
            transports = VarlenTransports(transport, transport, transport)
            options = CallOptions(transports, plan, 0, 1.0, None, passing, rebalances, None)
            counts = HEADS, KV_HEADS, KV_HEADS, HEADS
            q, k, v, dy = (torch.empty(rows, heads, SIZE, device="cuda", dtype=torch.bfloat16) for heads in counts)
            context: Any = Context()
            with Work(device, GPU):
                _BalancedAttention.forward(context, q, k, v, options)
                if backward:
                    device.ops.clear()
                    _BalancedAttention.backward(context, dy)
        devices.append(device)
    return devices


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("passing", ["kv", "q"])
@pytest.mark.parametrize(
    ("method", "lengths", "linear"),
    [("balanced", [65536, 9001, 300], False), ("ring", [30001, 20000], True), ("packing", [20000, 9000, 3000], True)],
)
def test_overlap(method: str, lengths: list[int], linear: bool, passing: Passing, backward: bool) -> None:
    spare = max(lengths) if method == "packing" else 0
    devices = record(one_pass(lengths, Topology(1, 4), spare, method), passing, linear=linear, backward=backward)
    took = times(devices)
    assert took.one <= took.bound, took
    assert took.eight <= took.bound, took
