"""Balanced attention over copies: the bits of messages over gloo, without a race or deadlock in any order of steps."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.ops.varlen import layout as rows_layout
from megatron_overlap.ops.varlen import ring
from megatron_overlap.ops.varlen.ring import VarlenTransports
from megatron_overlap.schedules.varlen import Topology
from megatron_overlap.schedules.varlen.ring_groups import Passing
from tests.comm.copy_protocol import RecordedBackend, Recording, ordered
from tests.helpers.world import World
from tests.ops.varlen import attention_workers, copies_workers
from tests.ops.varlen.attention_workers import Case, Heads
from tests.ops.varlen.test_attention import TOPOLOGIES, one_pass

STEPS: list[tuple[str, list[int], int, Passing, str]] = [
    ("balanced", [97, 9, 3, 1], 0, "kv", "attention"),
    ("packing", [13, 7, 5, 4], 13, "q", "linear"),
    ("hybrid", [201, 40, 5, 1], 25, "kv", "linear"),
    ("ring", [2], 0, "q", "linear"),
    ("balanced", [61, 45, 19, 8, 3, 1, 1, 0, 30, 2], 0, "q", "linear"),
    ("all_gather", [31, 5], 0, "kv", "attention"),
    ("hybrid", [60, 9, 1, 4, 2], 11, "q", "linear"),
    ("packing", [40], 40, "kv", "linear"),
    ("balanced", [90, 9, 3, 1], 0, "kv", "attention"),
]
"""Planner, lengths, spare rows of a rank, payloads and layout of growing and shrinking steps.

Rings of all ranks and of some, rows that move, and ranks without a document.
"""


def cases_of(topology: Topology) -> list[Case]:
    """The case of each step."""
    cases = []
    for method, lengths, spare, passing, layout in STEPS:
        planner = "balanced" if method == "hybrid" and topology.ranks == 3 else method
        cases.append(Case(one_pass(lengths, topology, spare, planner), Heads(6, 2), passing, layout))
    return cases


@pytest.mark.parametrize(
    ("size", "on_device"),
    [
        (2, False),
        (3, False),
        (4, True),
        *(pytest.param(size, size < 4, marks=pytest.mark.long) for size in (2, 3, 4)),
    ],
)
def test_bits_of_messages(world: World, size: int, on_device: bool) -> None:
    """Also of topologies with proxies, which copies do not need."""
    for topology, dtype in zip(TOPOLOGIES[size], (torch.bfloat16, torch.float64, torch.float32), strict=False):
        cases = cases_of(topology)
        for found in world.run(size, copies_workers.compare, cases, dtype, on_device=on_device):
            assert found.different == []
            assert found.maps[0] > 0
            assert sum(found.maps) < 40
            assert found.maps[-1] == 0


@pytest.mark.parametrize(
    ("size", "number", "device"),
    [(2, 0, "cpu"), (3, 0, "cuda"), (4, 1, "cuda"), pytest.param(4, 0, "cuda", marks=pytest.mark.long)],
)
def test_every_order_of_the_queues(size: int, number: int, device: str) -> None:
    """Messages may be as late as possible. With one hardware queue a rank runs its steps in the order of the calls."""
    cases = cases_of(TOPOLOGIES[size][number])
    check_every_order([cases[0], cases[6], cases[6], cases[1], cases[0]], size, device)


def test_every_order_of_rings_that_share_ranks() -> None:
    """Ranks send the results of a second ring between those of the first: in the order in which they complete them."""
    plan = one_pass([3, 30], Topology(1, 4))
    assert {ring.ranks for ring in plan.passes[0].rings} == {(0, 1, 2, 3), (2, 3)}
    check_every_order([Case(plan, passing="q")], 4, "cuda")


def check_every_order(cases: list[Case], size: int, device: str) -> None:
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, size, arenas, device) for rank in range(size)]
    for rank, backend in enumerate(backends):
        transport = CopyTransport(backend)
        with Recording(backend.computing):
            for case in cases:
                copies_workers.run(case, 0, attention_workers.batch_of_rank(rank, case, 0, 1), transport)
    ordered([queue for backend in backends for queue in backend.queues])
    ordered([backend.one_hardware_queue() for backend in backends])


def test_more_messages_than_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(one_pass([61], Topology(1, 4)), passing="q")
    monkeypatch.setattr(rows_layout, "MAX_FLAGS", 2)
    transport = CopyTransport(RecordedBackend(1, 4, {}))
    batch = attention_workers.batch_of_rank(1, case, 0, 1)
    with pytest.raises(TransportError, match="result: 2 or more messages .* use overlap.transport: nccl"):
        copies_workers.run(case, 0, batch, transport)


def test_only_the_steps_of_the_last_plan_are_kept() -> None:
    transport = CopyTransport(RecordedBackend(0, 2, {}))
    kept = []
    for seed in range(4):
        case = Case(one_pass([61, 4, 2], Topology(1, 2)), passing="q", layout="linear")
        for _ in range(2):
            copies_workers.run(case, 0, attention_workers.batch_of_rank(0, case, 0, seed), transport)
            kept.append(dict(transport.buffer_pool.derived))
    assert {len(each) for each in kept[1:]} == {3}  # payloads of forward, payloads and results of backward
    assert kept[4] == kept[5]
    assert not set(map(id, kept[3].values())) & set(map(id, kept[5].values()))


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_copies_need_one_channel(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    monkeypatch.setattr(ring.dist, "get_backend", lambda group: backend)
    opened: list[str] = []

    def open_channel(prepares: bool, name: str) -> Any:
        opened.append(name)
        return SimpleNamespace(prepares=prepares)

    for prepares in (True, False):
        found = VarlenTransports.open(Any, partial(open_channel, prepares))  # type: ignore[arg-type]
        assert len({id(each) for each in found}) == (3 if backend == "nccl" and not prepares else 1)
    assert opened == ["", "", *["intra", "rebalance"] * (backend == "nccl")]
