"""What one rank enqueues for the messages of `CopyTransport`: calls of several messages, waits, marks, errors."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS
from megatron_overlap.comm.transport import Exchange, Transfer, TransportError
from megatron_overlap.ops import LinearPlan, all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather, _GatheredRows
from megatron_overlap.ops.tensor_parallel.pipelined_reduce_scatter import _ScatteredRows
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.plan import Chunk, Message
from tests.comm.copy_protocol import (
    RecordedBackend,
    ordered,
)
from tests.comm.copy_recording import OPERATIONS, record


def test_a_call_waits_for_the_work_of_all_its_messages() -> None:
    """Also where a wait sends the messages before it at once."""
    backend = RecordedBackend(0, 3, {}, "cuda")
    transport, rows = CopyTransport(backend), torch.zeros(4, 64)
    received = transport.buffer_pool.take("received", (4, 64), rows, symmetric=True).split(2)
    chunk = Chunk(0, 0)
    work = transport.begin(
        [
            Transfer(Message(chunk, to, chunk, to, after_work=to, call=0), part, into, lands=into)
            for to, part, into in zip((1, 2), rows.split(2), received, strict=True)
        ],
        "two messages",
    )
    work.mark_ready(1)
    work.wait(0)
    sent: Any = transport.queues.sending
    assert not any(step.writes for step in sent.steps)
    backend.computing.write(rows, 0, 1)
    end = backend.computing.mark()
    work.mark_ready(2)
    assert [len(step.writes) for step in sent.steps if step.writes] == [2]
    assert [step.follows for step in sent.steps if step.follows] == [end]


def test_a_wait_for_several_messages_sends_before() -> None:
    """Also the messages that the plan places behind work that is not enqueued."""
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, 3, arenas, "cuda") for rank in range(3)]
    transports = [CopyTransport(backend) for backend in backends]
    for rank, transport in enumerate(transports):
        plan, shard = all_gather_plan(3, rank), torch.zeros(2, 64)
        full = transport.buffer_pool.take("gather", (6, 64), shard, symmetric=True)
        gather = PipelinedAllGather(transport, plan, (shard,), plan.layout(6), (full,), "gather", repeats=True)
        gather._p2p_work.wait(*range(len(plan.messages)))
        gather.finish()
    ordered([backend.one_hardware_queue() for backend in backends])


def test_what_a_call_enqueues() -> None:
    """On a device, for R ranks: R - 1 copies of a slice, and the later calls prepare nothing and keep no own rows."""
    size, rows = 4, 2
    backend = RecordedBackend(0, size, {}, "cuda")
    transport = CopyTransport(backend)
    weight, shard, whole = torch.ones(64, 64), torch.ones(rows, 64), torch.ones(rows * size, 64)
    plan = LinearPlan(pattern="direct")
    for operation, x, marks in ((all_gather_linear, shard, 3), (linear_reduce_scatter, whole, size + 1)):
        counted = []
        for _ in range(3):
            backend.calls.clear()
            with torch.no_grad():
                operation(x.clone(), weight, group=transport, plan=plan)
            copied = [step.writes[0] for step in backend.calls if step.writes]
            steps = [[step for step in backend.calls if getattr(step, kind)] for kind in ("sets", "clears", "follows")]
            counted.append((sum(stop - start for start, stop in copied), *map(len, (copied, *steps))))
        others = size - 1
        num_bytes = others * rows * 64 * 4
        assert counted == [(num_bytes, others, 2 * others, 2 * others, marks)] * 3
        *_, (_, rows_of) = transport.buffer_pool.derived.values()
        (state,) = rows_of.prepared.values()
        assert isinstance(rows_of, _GatheredRows) != any(message.copies for message in state.messages.all)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_queue_of_sends_runs(device: str) -> None:
    """For each message the wait (w) for a free buffer, the copy (c) and the flag (f), if several are one call too.

    A reduce-scatter waits for all buffers while its first GEMM runs.
    """
    backend = RecordedBackend(0, 4, {}, device)
    transport, weight, plan = CopyTransport(backend), torch.ones(64, 64), LinearPlan(pattern="direct")
    queue: Any = transport.queues.sending
    kinds, wanted = {"w": "clears", "c": "writes", "f": "sets"}, {"ag_gemm": "wcf" * 3, "gemm_rs": "www" + "cf" * 3}
    for op, expected in wanted.items():
        before = len(queue.steps)
        with torch.no_grad():
            OPERATIONS[op](torch.ones(8, 64), weight, group=transport, plan=plan)
        found = "".join(each for step in queue.steps[before:] for each in kinds if getattr(step, kinds[each]))
        assert found == expected


def test_a_flag_is_set_before_the_wait_of_the_next_message() -> None:
    """Also where both are one call of the driver: the receiver may need the message to free the next buffer."""
    transport, rows, chunk = CopyTransport(RecordedBackend(0, 3, {}, "cuda")), torch.zeros(4, 64), Chunk(0, 0)
    received = transport.buffer_pool.take("received", (4, 64), rows, symmetric=True).split(2)
    transport.begin(
        [
            Transfer(Message(chunk, to, chunk, to), part, into, lands=into)
            for to, part, into in zip((1, 2), rows.split(2), received, strict=True)
        ],
        "two messages",
    )
    queue: Any = transport.queues.sending
    found = [kind for step in queue.steps for kind in ("clears", "writes", "sets") if getattr(step, kind)]
    assert found == ["clears", "writes", "sets"] * 2


@pytest.mark.parametrize("seed", range(10))
def test_calls_in_another_order_enqueue_steps_of_their_own(seed: int) -> None:
    """The steps of an operation do not depend on the orders of earlier operations. Exchanges of one call only, too."""
    draw, arenas = random.Random(seed), dict[tuple[str, int], list[torch.Tensor]]()
    plan, partial = reduce_scatter_plan(3, 0, chunks_per_rank=2), torch.zeros(12, 4)
    num_work = len(plan.work)

    def new() -> tuple[CopyTransport, RecordedBackend, _ScatteredRows]:
        backend = RecordedBackend(0, 3, arenas, "cuda")
        transport = CopyTransport(backend)
        terms = transport.buffer_pool.take("received", (8, 4), partial, symmetric=True)
        return transport, backend, _ScatteredRows(plan, plan.layout(12), partial, terms, hidden=True)

    def enqueued(calls: list[tuple[str, tuple[int, ...]]], opened: Any, *, repeats: bool = True) -> list[Any]:
        transport, backend, rows = opened
        begin = {queue.name: len(queue.steps) for queue in backend.queues}
        work = transport.begin(Exchange(rows) if repeats else rows.build(None), "op")
        for name, arguments in calls:
            getattr(work, name)(*arguments)
        return [
            (queue.name, step.sets, step.clears, step.writes, step.follows and step.follows[1] - begin[step.follows[0]])
            for queue in backend.queues
            for step in queue.steps[begin[queue.name] :]
        ]

    opened = new()
    for _ in range(12):
        calls, done, left = list[tuple[str, tuple[int, ...]]](), 0, list(range(len(plan.messages)))
        while done < num_work:
            if left and draw.random() < 0.2:
                calls.append(("wait", (left.pop(draw.randrange(len(left))),)))
            else:
                done = min(num_work, done + draw.randint(1, 2))
                calls.append(("mark_ready", (done,)))
        calls += [("wait_all", ())] * 2
        for repeats in (True, True, False):
            assert enqueued(calls, opened, repeats=repeats) == enqueued(calls, new())


def test_a_message_between_symmetric_buffers_is_one_copy() -> None:
    recorded = record(3, ["ag_gemm", "gemm_rs"])
    copies = [sum(bool(step.writes) for step in queue.steps) for queue in recorded.queues if "copies" in queue.name]
    sending, receiving = 2 * 2, 0
    assert copies == [sending, receiving] * 3


def test_messages_land_in_symmetric_buffers() -> None:
    """Any other message is an error that names it, before the ranks wait for each other."""
    transport, chunk, content = CopyTransport(RecordedBackend(0, 2, {})), Chunk(0, 0), torch.zeros(4)
    message = Message(chunk, 1, chunk, 1)
    buffer = transport.buffer_pool.take("received", (4,), content, symmetric=True)
    ordinary = [Transfer(message, content, buffer), Transfer(message, content, buffer, lands=torch.zeros(4))]
    second_tensor = Transfer(message, content, buffer, (content,), (buffer,), lands=buffer)
    for transfer in (*ordinary, second_tensor):
        with pytest.raises(TransportError, match=r"^one: cannot send message 0 .* to rank 1: it lands in no symmetric"):
            transport.begin([transfer], "one")
    empty = torch.empty(0)
    transport.begin([Transfer(message, empty, empty)], "nothing").wait_all()


def test_an_operation_has_a_limited_number_of_messages() -> None:
    transport, chunk, content = CopyTransport(RecordedBackend(0, 2, {})), Chunk(0, 0), torch.zeros(1)
    buffer = transport.buffer_pool.take("received", (1,), content, symmetric=True)
    transfers = [Transfer(Message(chunk, 1, chunk, 1), content, buffer, lands=buffer)] * (MAX_FLAGS + 1)
    transport.begin(transfers[1:], "many")
    with pytest.raises(
        TransportError, match=f"^many: more than {MAX_FLAGS} messages between two ranks; use fewer chunks"
    ):
        transport.begin(transfers, "many")
