"""The calls of the NCCL transport, recorded by a model of streams and events. Runs neither a GPU nor NCCL."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_overlap.comm import nccl
from megatron_overlap.comm.transport import Transfer, TransportError, TransportOptions
from megatron_overlap.schedules import Plan, all_gather_plan, reduce_scatter_plan
from megatron_overlap.tracing import Kind
from tests.comm.device import Recorder, play

PLANS: dict[str, Callable[..., Plan]] = {"all_gather": all_gather_plan, "reduce_scatter": reduce_scatter_plan}
SIZE = 4


def record(monkeypatch: pytest.MonkeyPatch, rank: int, plans: list[Plan], *, between: bool = False) -> Recorder:
    """Run `plans` as operations on the device model of one rank. `between` adds concurrent collectives of Megatron."""
    device = Recorder(rank, plans[0].num_ranks)
    monkeypatch.setattr(nccl, "torch", device.torch)
    monkeypatch.setattr(nccl, "dist", device.dist)
    monkeypatch.setattr(nccl, "store_beside", lambda group: None)
    group: Any = SimpleNamespace()
    transport = nccl.NcclTransport(group, TransportOptions(timeout_s=5))
    for number, plan in enumerate(plans):
        run(transport, device, plan, number, between)
    return device


def run(transport: Any, device: Recorder, plan: Plan, number: int, between: bool) -> None:
    transfers = [Transfer(message, torch.zeros(1), torch.zeros(1)) for message in plan.messages]
    p2p_work = transport.begin(transfers, "op")
    waited: set[int] = set()
    for index, work in enumerate(plan.work):
        for message in (*work.needs, *work.adds):
            p2p_work.wait(message)
            waited.add(message)
        device.put("work", (number, index))
        p2p_work.mark_ready(index + 1)
        if between and index == 1:  # like a gradient bucket that fills in the middle of a layer
            full = device.event()
            full.record()
            with device.on(SimpleNamespace(name="megatron")):
                device.wait(full)
                device.put("collective", ("gradients", number))
    p2p_work.wait_all()


@pytest.mark.parametrize("connections", [None, 1])
@pytest.mark.parametrize("between", [False, True], ids=["alone", "with-collectives"])
@pytest.mark.parametrize("pattern", ["direct", "ring"])
def test_no_execution_order_deadlocks(
    monkeypatch: pytest.MonkeyPatch, pattern: str, between: bool, connections: int | None
) -> None:
    def plans(rank: int) -> list[Plan]:
        return [make(SIZE, rank, chunks_per_rank=2, pattern=pattern) for make in PLANS.values() for _ in range(2)]

    ranks = [record(monkeypatch, rank, plans(rank), between=between) for rank in range(SIZE)]
    assert play(ranks, connections=connections) == []


def test_a_missing_operation_of_one_rank_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the device model: its replay reports peers that wait for a missing operation."""
    plans = [all_gather_plan(SIZE, rank) for rank in range(SIZE)]
    ranks = [record(monkeypatch, rank, [plans[rank]] * (1 if rank == 0 else 2)) for rank in range(SIZE)]
    left = play(ranks)
    assert any(line.startswith("rank 1: nccl: messages") for line in left)


@pytest.mark.parametrize("collective", PLANS)
def test_nothing_waits_on_the_host(monkeypatch: pytest.MonkeyPatch, collective: str) -> None:
    """The model has no synchronize, query or elapsed_time, so a call of one fails. Events order messages."""
    plan = PLANS[collective](SIZE, 1)
    device = record(monkeypatch, 1, [plan])
    kinds = [(op.stream, op.kind) for op in device.ops]
    # The computing stream waits once for each message: a second wait for the last one would have no effect.
    assert kinds.count(("compute", "wait")) == sum(len(work.needs) + len(work.adds) for work in plan.work)
    assert kinds.count(("nccl", "messages")) == len(plan.messages)
    # Each message follows the computing stream, whose buffers it reads and writes.
    first = kinds.index(("nccl", "messages"))
    assert kinds.index(("compute", "record")) < kinds.index(("stream 1", "wait")) < first


def collectives(device: Recorder, transport: Any, count: int) -> None:
    """All-gathers and reduce-scatters in turn, each beside one unit of work."""
    shard, full = torch.zeros(2, 3), torch.zeros(2 * SIZE, 3)
    for number in range(count):
        device.put("work", ("before", number))
        if number % 2 == 0:
            started = transport.collectives.all_gather(shard, full, "op")
        else:
            started = transport.collectives.reduce_scatter(full, shard, "op")
        device.put("work", ("beside", number))
        started.wait()
        device.put("work", ("after", number))


@pytest.mark.parametrize("connections", [None, 1])
def test_collectives(monkeypatch: pytest.MonkeyPatch, connections: int | None) -> None:
    """A collective starts after the work that was enqueued before it, and overlaps the work enqueued after it."""
    ranks = []
    for rank in range(SIZE):
        device, transport = opened(monkeypatch, rank, SIZE)
        collectives(device, transport, 4)
        ranks.append(device)
    alone = ranks[0]
    moved = (SIZE - 1) * 2 * 3 * 4
    found = [op.label for op in alone.ops if op.kind == "collective"]
    assert found == [(("all_gather", "reduce_scatter")[n % 2], n + 1, moved) for n in range(4)]
    play([alone, *(Recorder(rank, SIZE) for rank in range(1, SIZE))], connections=connections)
    assert [op.label for op in alone.ops if op.kind == "work" and op.done] == [("before", 0), ("beside", 0)]
    assert not any(op.done for op in alone.ops if op.kind == "collective")
    for op in alone.ops:
        op.done = op.started = False
    assert play(ranks, connections=connections) == []
    order = [op for op in alone.ops if op.kind in ("work", "collective")]
    assert [op.label[0] for op in order[:4]] == ["before", "all_gather", "beside", "after"]


def test_a_collective_that_does_not_start_names_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RuntimeError("NCCL error: remote process exited")

    _, transport = opened(monkeypatch, 1, SIZE)
    monkeypatch.setattr(transport._group, "_allgather_base", refuse, raising=False)
    text = r"reduce of a part: rank 1 could not start .* of ranks 0-3: NCCL error: remote process exited"
    with pytest.raises(TransportError, match=text):
        transport.all_gather(torch.zeros(1), torch.zeros(SIZE), "reduce of a part")


def test_a_trace_has_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one message to the next rank, between two marks of the stream, and the wait for it."""
    device, transport = opened(monkeypatch, 1, SIZE)
    added: list[tuple[Any, ...]] = []
    marks = SimpleNamespace(mark=lambda: device.put("mark"))
    timing = SimpleNamespace(owner=marks, began=None, add=lambda *event: added.append((device.current, *event)))
    monkeypatch.setattr(transport, "_events", lambda op: timing)
    collectives(device, transport, 1)
    (_, _, _, number, transfer), *_ = added
    assert [event[:2] for event in added] == [
        ("stream 1", Kind.RECEIVED),
        ("compute", Kind.WAIT),
        ("compute", Kind.OP),
    ]
    assert (number, transfer.message.to, transfer.message.source) == (0, 2, 0)
    assert transfer.send_bytes == transfer.recv_bytes == (SIZE - 1) * 2 * 3 * 4
    kinds = [(op.stream, op.kind) for op in device.ops]
    start = kinds.index(("stream 1", "wait"))  # after the work before it
    assert kinds[start + 1] == ("stream 1", "mark")
    assert kinds.index(("nccl", "collective")) > start
    assert ("compute", "wait") in kinds[kinds.index(("nccl", "collective")) :], "the caller waits, too"
    assert ("stream 1", "wait") in kinds[kinds.index(("nccl", "collective")) :], "the end is after the collective"


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_a_traced_collective_keeps_its_operands_until_the_wait(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """torch frees them after the first wait for the work, which is not the caller's: NCCL may still read them."""
    device, transport = opened(monkeypatch, 1, SIZE)
    owner: Any = SimpleNamespace(mark=lambda: device.put("mark"), intervals=[])
    events: Any = SimpleNamespace()
    monkeypatch.setattr(transport, "_events", lambda op: nccl.CudaWorkEvents(owner, events, owner.mark()))
    shard, full = torch.zeros(2, 3), torch.zeros(2 * SIZE, 3)
    operand, into = (shard, full) if name == "all_gather" else (full, shard)
    work = getattr(transport, name)(operand, into, "op")
    alive = StorageWeakRef(operand.untyped_storage())
    del shard, full, operand
    assert not alive.expired()
    work.wait()
    assert alive.expired(), "a trace keeps the operands"
    assert len(owner.intervals) == 3


def test_work_that_needs_a_message_waits_for_it_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peers never send. Only the work before the first message completes."""
    plan = all_gather_plan(SIZE, 1)
    device = record(monkeypatch, 1, [plan])
    left = play([device])
    assert [op.label for op in device.ops if op.kind == "work" and op.done] == [(0, 0)]
    assert len([line for line in left if line.startswith("rank 0: nccl: messages")]) == len(plan.messages)


def test_the_end_of_an_operation_waits_for_its_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller may reuse the sent buffers after `wait_all`, so later work of the caller waits for the sends."""
    device = record(monkeypatch, 0, [reduce_scatter_plan(SIZE, 0)])
    device.put("work", "later work of the caller")
    play([device])
    assert not device.ops[-1].done


def test_a_send_follows_the_work_that_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = reduce_scatter_plan(SIZE, 0)
    device = record(monkeypatch, 0, [plan])
    order = [op for op in device.ops if op.kind in ("work", "messages")]
    messages = [index for index, op in enumerate(order) if op.kind == "messages"]
    for message, place in zip(plan.messages, messages, strict=True):
        assert sum(op.kind == "work" for op in order[:place]) >= message.after_work
    # The message stream waits for an event recorded after that work, but for no event recorded after later work.
    done, recorded, followed, number = 0, {}, 0, 0
    for op in device.ops:
        if op.kind == "work":
            done += 1
        elif op.kind == "record":
            recorded[op.label] = done
        elif (op.kind, op.stream) == ("wait", "stream 1"):
            followed = max(followed, recorded[op.label])
        elif op.kind == "messages":
            assert followed == plan.messages[number].after_work
            number += 1
    assert number == len(plan.messages)


def test_streams_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    device = record(monkeypatch, 0, [all_gather_plan(2, 0)])
    assert device.options.is_high_priority_stream
    assert device.options._timeout.total_seconds() == 5
    assert device.made_streams == [{"priority": -1}]


def opened(monkeypatch: pytest.MonkeyPatch, rank: int = 0, size: int = 2, **options: bool) -> tuple[Recorder, Any]:
    device = Recorder(rank, size)
    monkeypatch.setattr(nccl, "torch", device.torch)
    monkeypatch.setattr(nccl, "dist", device.dist)
    monkeypatch.setattr(nccl, "store_beside", lambda group: None)
    return device, nccl.NcclTransport(SimpleNamespace(), TransportOptions(timeout_s=5, **options))  # type: ignore[arg-type]


def test_buffers_are_registered_if_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    device, transport = opened(monkeypatch, register_buffers=True)
    transport.buffer_pool.take("received", (3,), torch.zeros(1))
    transport.buffer_pool.take("received", (2,), torch.zeros(1))
    pool = "pool of nccl's"
    assert device.buffers == ["connect", f"register {pool}", f"from {pool}"]
    transport.close()
    assert device.buffers[3:] == [f"deregister {pool}", "shutdown"]
    device, transport = opened(monkeypatch)
    transport.buffer_pool.take("received", (3,), torch.zeros(1))
    transport.close()
    assert device.buffers == ["connect", "shutdown"]


def test_a_torch_without_registration_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Recorder.torch.fget  # type: ignore[attr-defined]

    def without(device: Recorder) -> Any:
        module = made(device)
        del module.cuda.MemPool
        return module

    monkeypatch.setattr(Recorder, "torch", property(without))
    with pytest.raises(TransportError, match=r"overlap\.register_buffers: torch .* cannot; set it to false"):
        opened(monkeypatch, register_buffers=True)


def test_the_model_uses_names_of_torch() -> None:
    names = ("eager_connect_single_device", "mem_allocator", "register_mem_pool", "deregister_mem_pool", "shutdown")
    real = pytest.importorskip("torch._C._distributed_c10d").ProcessGroupNCCL
    assert all(hasattr(real, name) for name in names)
    c10d = pytest.importorskip("torch._C._distributed_c10d")
    assert all(hasattr(c10d.ProcessGroup, name) for name in ("_allgather_base", "_reduce_scatter_base"))
    assert c10d.AllgatherOptions().asyncOp
    assert c10d.ReduceScatterOptions().asyncOp
    assert "pool" in inspect.signature(torch.cuda.use_mem_pool).parameters
    assert "allocator" in inspect.signature(torch.cuda.MemPool.__init__).parameters
