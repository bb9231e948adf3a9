"""Executes the Ulysses plans of all ranks symbolically, and proves them or reports the fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.schedules.ulysses import AllToAllPlan, HeadMessage, Piece, Task
from tests.schedules.verify import ScheduleError


@dataclass(frozen=True, slots=True)
class AllToAllProof:
    """Result of a proof.

    Attributes:
        num_messages: messages of one rank (the same on every rank).
        exposed_in: head groups that must be received before the first attention; 1 if the others are hidden.
        exposed_out: head groups whose results are sent only after the last attention.
    """

    num_messages: int
    exposed_in: int
    exposed_out: int


@dataclass(slots=True)
class _Rank:
    plan: AllToAllPlan
    posted: int = 0
    has_sent: bool = False
    has_received: bool = False
    work_done: int = 0
    held: dict[Piece, int] = field(default_factory=dict)
    """For each piece that the rank holds, the number of tasks that were done when it was computed or received."""
    received: set[int] = field(default_factory=set)
    done: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def current(self) -> HeadMessage | None:
        return self.plan.messages[self.posted] if self.posted < len(self.plan.messages) else None


def check_all_to_all(plans: Sequence[AllToAllPlan]) -> AllToAllProof:
    """Executes one plan per rank and proves that together they equal attention between two all-to-alls.

    Messages use a rendezvous, the strictest transport, as in `tests.schedules.verify`.

    Proved: every rank produces its rows for the heads of every rank and group once, computes attention for every group
    of its own heads once with the rows of all ranks, and consumes the results of every rank and group once; no rank
    sends a piece that it does not hold, or reads a piece that it has not waited for; both ranks number a message alike;
    nothing deadlocks; every message that is sent is received.

    Args:
        plans: plan of rank 0, 1, ..., in order.

    Raises:
        ScheduleError: names the rank and the message or task at fault.
    """
    size = len(plans)
    first = plans[0]
    for index, plan in enumerate(plans):
        like = (plan.num_ranks, plan.rank, plan.num_groups, plan.num_runs)
        if like != (size, index, first.num_groups, first.num_runs):
            raise ScheduleError(f"plan {index} of {size} is for rank {plan.rank} of {plan.num_ranks}, or cut otherwise")
    ranks = [_Rank(plan) for plan in plans]
    while True:
        delivered = sum(_deliver(ranks, rank) for rank in ranks)
        if sum(_task(rank) for rank in ranks) == 0 and delivered == 0:
            break
    for rank in ranks:
        _finished(rank)
    return AllToAllProof(
        len(first.messages), max(map(_exposed_in, plans), default=0), max(map(_exposed_out, plans), default=0)
    )


def _exposed_in(plan: AllToAllPlan) -> int:
    task = next(task for task in plan.work if task.step == "attend")
    return len({plan.messages[k].recv.group for k in task.needs})


def _exposed_out(plan: AllToAllPlan) -> int:
    last = max(index for index, task in enumerate(plan.work) if task.step == "attend")
    return len({m.send.group for m in plan.messages if m.send.direction == "out" and m.after_work > last})


def _deliver(ranks: list[_Rank], sender: _Rank) -> bool:
    """Delivers the current message of `sender` if it is also the current message of the receiver."""
    message = sender.current()
    if message is None or sender.has_sent or message.after_work > sender.work_done:
        return False
    where = f"rank {sender.plan.rank}, message {sender.posted}"
    if message.to == sender.plan.rank:
        raise ScheduleError(f"{where}: to itself")
    receiver = ranks[message.to]
    expected = receiver.current()
    if expected is None or receiver.has_received or expected.source != sender.plan.rank:
        return False
    if expected.recv != message.send:
        raise ScheduleError(f"{where}: sends {message.send} to rank {message.to}, which expects {expected.recv}")
    if receiver.posted != sender.posted:
        raise ScheduleError(f"{where}: is message {receiver.posted} of rank {message.to}; both must number it alike")
    # Compare with `after_work` instead of the current progress: the plan must hold for the earliest possible send.
    if sender.held.get(message.send, message.after_work + 1) > message.after_work:
        raise ScheduleError(f"{where}: may send {message.send} before it is computed")
    receiver.held[expected.recv] = receiver.work_done
    receiver.received.add(receiver.posted)
    sender.has_sent = receiver.has_received = True
    for rank in (sender, receiver):
        if rank.has_sent and rank.has_received:
            rank.posted += 1
            rank.has_sent = rank.has_received = False
    return True


def _task(rank: _Rank) -> bool:
    """Runs the next task if the messages that it needs are received."""
    plan = rank.plan
    if rank.work_done == len(plan.work):
        return False
    task = plan.work[rank.work_done]
    if any(k not in rank.received for k in task.needs):
        return False
    where = f"rank {plan.rank}, task {rank.work_done}"
    runs = range(plan.num_runs)
    if task.step == "produce":
        computed = {Piece("in", task.group, peer, plan.rank, run) for peer in task.peers for run in runs}
    elif task.step == "attend":
        rows = range(plan.num_ranks)
        _read(rank, task, {Piece("in", task.group, plan.rank, row, run) for row in rows for run in runs}, where)
        computed = {Piece("out", task.group, plan.rank, row, run) for row in rows for run in runs}
    else:
        computed = set()
        _read(
            rank, task, {Piece("out", task.group, peer, plan.rank, run) for peer in task.peers for run in runs}, where
        )
    rank.done.update((task.step, task.group, peer) for peer in task.peers)
    rank.work_done += 1
    rank.held.update(dict.fromkeys(computed, rank.work_done))
    return True


def _read(rank: _Rank, task: Task, pieces: set[Piece], where: str) -> None:
    """Refuses to read a piece that the rank does not hold, or that this task does not wait for."""
    own = rank.plan.rank
    awaited = {rank.plan.messages[k].recv for k in task.needs}
    for piece in pieces:
        if piece not in rank.held:
            raise ScheduleError(f"{where}: reads {piece}, which it does not hold")
        if (piece.heads, piece.rows) != (own, own) and piece not in awaited:
            raise ScheduleError(f"{where}: reads {piece} without waiting for it")


def _finished(rank: _Rank) -> None:
    plan = rank.plan
    if rank.posted < len(plan.messages) or rank.work_done < len(plan.work):
        raise ScheduleError(
            f"rank {plan.rank}: deadlock at message {rank.posted} of {len(plan.messages)}, "
            f"task {rank.work_done} of {len(plan.work)}"
        )
    groups, peers = range(plan.num_groups), range(plan.num_ranks)
    expected = Counter({("attend", group, plan.rank): 1 for group in groups})
    expected.update((step, group, peer) for step in ("produce", "consume") for group in groups for peer in peers)
    if rank.done != expected:
        wrong = sorted((rank.done - expected) | (expected - rank.done))
        raise ScheduleError(f"rank {plan.rank}: not done exactly once: {wrong}")
