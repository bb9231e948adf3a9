"""Worker functions of the tests of the gloo transport."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_overlap.comm import TransportError
from megatron_overlap.comm.gloo import _NUM_OPS, GlooTransport
from megatron_overlap.comm.transport import Transfer, TransportOptions
from megatron_overlap.ops import all_gather_linear
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan
from megatron_overlap.tracing import EVENT, Kind, Trace


def missing_peer(group: dist.ProcessGroup) -> tuple[str, float]:
    """Rank 0 waits for a message that rank 1 never sends. Returns the error message and the seconds until it."""
    transport = GlooTransport(group, TransportOptions(timeout_s=1.0))
    message_text, start = "", time.perf_counter()
    if transport.rank == 0:
        plan = all_gather_plan(2, 0)
        transfers = [Transfer(message, torch.zeros(4), torch.zeros(4)) for message in plan.messages]
        p2p_work = transport.begin(transfers, "all_gather_linear")
        try:
            p2p_work.wait(0)
        except TransportError as error:
            message_text = str(error)
    took = time.perf_counter() - start
    dist.barrier(group)
    transport.close()
    return message_text, took


def dead_thread(group: dist.ProcessGroup) -> tuple[str, str]:
    """The receiving thread of rank 0 has ended. Returns the errors of its wait, before and after another failure."""
    transport = GlooTransport(group, TransportOptions(timeout_s=0.5))
    texts = ["", ""]
    plan = all_gather_plan(2, transport.rank)
    if transport.rank == 0:
        transport._receivers[1].put(None)
    transfers = [Transfer(message, torch.zeros(4), torch.zeros(4)) for message in plan.messages]
    p2p_work = transport.begin(transfers, "all_gather_linear")
    if transport.rank == 0:
        for number in range(2):
            try:
                p2p_work.wait(0)
            except TransportError as error:
                texts[number] = str(error)
            p2p_work._fail(0, RuntimeError("connection closed"), sends=True)
    dist.barrier(group)
    transport.close()
    return texts[0], texts[1]


def sends_wait_for_mark_ready(group: dist.ProcessGroup) -> list[float]:
    """A send transmits the content of its buffer at `mark_ready`, not at `begin`."""
    transport = GlooTransport(group)
    plan = reduce_scatter_plan(2, transport.rank, chunks_per_rank=2)
    out, into = torch.zeros(2, 3), torch.full((2, 3), float("nan"))
    p2p_work = transport.begin(
        [Transfer(message, out[i], into[i]) for i, message in enumerate(plan.messages)], "linear_reduce_scatter"
    )
    for done in (1, 2):
        time.sleep(0.05)
        out[done - 1] = 10 * transport.rank + done
        p2p_work.mark_ready(done)
    p2p_work.wait_all()
    assert p2p_work.is_completed(0)
    assert p2p_work.is_completed(1)
    transport.close()
    return into[:, 0].tolist()


def threads_end(group: dist.ProcessGroup) -> tuple[int, int]:
    """Return the number of threads of this process before a transport is opened and after it is closed."""

    def count() -> int:
        return len(list(Path("/proc/self/task").iterdir()))

    before = count()
    transport = GlooTransport(group)
    assert count() > before + 2
    # The peer may still be connecting to this rank.
    dist.barrier(group)
    transport.close()
    return before, count()


def many_operations(group: dist.ProcessGroup, count: int) -> bool:
    """Operations that begin before earlier ones complete receive their own messages."""
    transport = GlooTransport(group)
    plan = all_gather_plan(transport.size, transport.rank, chunks_per_rank=2, pattern="direct")
    p2p_works, received = [], []
    for number in range(count):
        sends = [torch.full((5,), float(100 * number + 10 * transport.rank + e.send.part)) for e in plan.messages]
        recvs = [torch.zeros(5) for _ in plan.messages]
        transfers = [Transfer(e, s, r) for e, s, r in zip(plan.messages, sends, recvs, strict=True)]
        p2p_works.append(transport.begin(transfers, f"p2p_work {number}"))
        received.append(recvs)
    for number, (p2p_work, recvs) in enumerate(zip(p2p_works, received, strict=True)):
        p2p_work.wait_all()
        for message, recv in zip(plan.messages, recvs, strict=True):
            expected = 100 * number + 10 * message.source + message.recv.part
            assert torch.equal(recv, torch.full((5,), float(expected)))
    transport.close()
    return True


def numbers_after_tags_repeat(group: dist.ProcessGroup) -> tuple[list[int], list[bool]]:
    """Return the recorded numbers of operations around the repetition of tags, and whether each result is right."""
    trace = Trace()
    transport = GlooTransport(group, TransportOptions(trace=trace))
    transport._num_ops = _NUM_OPS - 3
    x = torch.full((2, 4), float(transport.rank))
    gathered = torch.arange(float(transport.size)).repeat_interleave(2)[:, None].expand(-1, 4)
    right = [torch.equal(all_gather_linear(x + op, torch.eye(4), group=transport), gathered + op) for op in range(6)]
    rows = np.array(trace.take()[1], dtype=EVENT)
    transport.close()
    return rows[rows["kind"] == Kind.OP]["operation"].tolist(), right


def a_late_peer_does_not_block_other_peers(group: dist.ProcessGroup) -> list[int]:
    """Return the completed messages of rank 2 before rank 1 begins. Its first message comes from rank 1."""
    transport = GlooTransport(group)
    plan = all_gather_plan(3, transport.rank)
    shard = torch.full((4,), float(transport.rank))
    into = torch.full((2, 4), float("nan"))
    if transport.rank == 1:
        dist.barrier(group)
    p2p_work = transport.begin(
        [Transfer(message, shard, into[i]) for i, message in enumerate(plan.messages)], "all_gather_linear"
    )
    completed: list[int] = []
    if transport.rank == 2:
        p2p_work.wait(1)
        completed = [index for index in (0, 1) if p2p_work.is_completed(index)]
    if transport.rank != 1:
        dist.barrier(group)
    p2p_work.wait_all()
    transport.close()
    return completed


def a_ready_message_overtakes_one_that_is_not_ready(group: dist.ProcessGroup) -> bool:
    """Return whether a ready message arrives while the message of an earlier operation is not ready."""
    transport = GlooTransport(group)
    first_message = reduce_scatter_plan(2, transport.rank).messages[0]
    second_message = all_gather_plan(2, transport.rank).messages[0]
    into = torch.zeros(2, 3)
    first = transport.begin([Transfer(first_message, torch.ones(3), into[0])], "linear_reduce_scatter")
    second = transport.begin([Transfer(second_message, torch.ones(3), into[1])], "all_gather_linear")
    deadline = time.monotonic() + 10
    while not into[1].all() and time.monotonic() < deadline:
        time.sleep(0.01)
    overtook = bool(into[1].all()) and not into[0].any()
    dist.barrier(group)
    first.mark_ready(1)
    first.wait_all()
    second.wait_all()
    transport.close()
    return overtook
