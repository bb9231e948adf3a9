"""Plays the Ulysses plans of all ranks together and proves them, or names what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_overlap.schedules.all_to_all import AllToAllPlan, HeadMessage, Piece, Task
from megatron_overlap.schedules.verify import ScheduleError


@dataclass(frozen=True, slots=True)
class AllToAllProof:
    """What playing the plans showed.

    Attributes:
        num_messages: messages of one rank (the same on every rank).
        exposed_in: head groups that must have landed before the first attention: 1 where the others are hidden.
        exposed_out: head groups whose results leave only after the last attention.
    """

    num_messages: int
    exposed_in: int
    exposed_out: int


@dataclass(slots=True)
class _Rank:
    plan: AllToAllPlan
    posted: int = 0
    sent: bool = False
    received: bool = False
    work_done: int = 0
    held: dict[Piece, int] = field(default_factory=dict)
    """Each piece, and the number of tasks that were done when it was made or had landed."""
    landed: set[int] = field(default_factory=set)
    done: Counter[tuple[str, int, int]] = field(default_factory=Counter)

    def current(self) -> HeadMessage | None:
        return self.plan.messages[self.posted] if self.posted < len(self.plan.messages) else None


def check_all_to_all(plans: Sequence[AllToAllPlan]) -> AllToAllProof:
    """Plays one plan per rank and proves that together they are attention between two all-to-alls.

    A message is played as a rendezvous, the strictest transport, as in `checker.check`.

    Proved: every rank produces its rows for the heads of every rank and group once, attends to every group of its own
    heads once, with the rows of all ranks there, and consumes the results of every rank and group once; no rank sends a
    piece that it does not hold, or reads one that it has not waited for; both ends number a message alike; nothing
    deadlocks; every message that is sent is received.

    Args:
        plans: plan of rank 0, 1, ..., in order.

    Raises:
        ScheduleError: naming the rank and the message or task at fault.
    """
    size = len(plans)
    first = plans[0]
    for index, plan in enumerate(plans):
        like = (plan.num_ranks, plan.rank, plan.num_groups, plan.num_runs)
        if like != (size, index, first.num_groups, first.num_runs):
            raise ScheduleError(f"plan {index} of {size} is for rank {plan.rank} of {plan.num_ranks}, or cut otherwise")
    ranks = [_Rank(plan) for plan in plans]
    while True:
        moved = sum(_deliver(ranks, rank) for rank in ranks)
        if sum(_task(rank) for rank in ranks) == 0 and moved == 0:
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
    return len({m.send.group for m in plan.messages if m.send.way == "out" and m.after_work > last})


def _deliver(ranks: list[_Rank], sender: _Rank) -> bool:
    """Moves `sender`'s current message if both ends have come to it."""
    message = sender.current()
    if message is None or sender.sent or message.after_work > sender.work_done:
        return False
    where = f"rank {sender.plan.rank}, message {sender.posted}"
    if message.to == sender.plan.rank:
        raise ScheduleError(f"{where}: to itself")
    receiver = ranks[message.to]
    expected = receiver.current()
    if expected is None or receiver.received or expected.source != sender.plan.rank:
        return False
    if expected.recv != message.send:
        raise ScheduleError(f"{where}: sends {message.send} to rank {message.to}, which expects {expected.recv}")
    if receiver.posted != sender.posted:
        raise ScheduleError(f"{where}: is message {receiver.posted} of rank {message.to}; both must number it alike")
    # By the plan alone, not by how far the rank happens to be: a send that may leave early, will one day.
    if sender.held.get(message.send, message.after_work + 1) > message.after_work:
        raise ScheduleError(f"{where}: may send {message.send} before it is made")
    receiver.held[expected.recv] = receiver.work_done
    receiver.landed.add(receiver.posted)
    sender.sent = receiver.received = True
    for rank in (sender, receiver):
        if rank.sent and rank.received:
            rank.posted += 1
            rank.sent = rank.received = False
    return True


def _task(rank: _Rank) -> bool:
    """Does the next task if what it waits for has landed."""
    plan = rank.plan
    if rank.work_done == len(plan.work):
        return False
    task = plan.work[rank.work_done]
    if any(k not in rank.landed for k in task.needs):
        return False
    where = f"rank {plan.rank}, task {rank.work_done}"
    runs = range(plan.num_runs)
    if task.step == "produce":
        made = {Piece("in", task.group, peer, plan.rank, run) for peer in task.peers for run in runs}
    elif task.step == "attend":
        rows = range(plan.num_ranks)
        _read(rank, task, {Piece("in", task.group, plan.rank, row, run) for row in rows for run in runs}, where)
        made = {Piece("out", task.group, plan.rank, row, run) for row in rows for run in runs}
    else:
        made = set()
        _read(
            rank, task, {Piece("out", task.group, peer, plan.rank, run) for peer in task.peers for run in runs}, where
        )
    rank.done.update((task.step, task.group, peer) for peer in task.peers)
    rank.work_done += 1
    rank.held.update(dict.fromkeys(made, rank.work_done))
    return True


def _read(rank: _Rank, task: Task, pieces: set[Piece], where: str) -> None:
    """Refuses to read what is not there, or is there only by chance: not waited for by this task."""
    own = rank.plan.rank
    waited = {rank.plan.messages[k].recv for k in task.needs}
    for piece in pieces:
        if piece not in rank.held:
            raise ScheduleError(f"{where}: reads {piece}, which it does not hold")
        if (piece.heads, piece.rows) != (own, own) and piece not in waited:
            raise ScheduleError(f"{where}: reads {piece} without waiting for it")


def _finished(rank: _Rank) -> None:
    plan = rank.plan
    if rank.posted < len(plan.messages) or rank.work_done < len(plan.work):
        raise ScheduleError(
            f"rank {plan.rank}: deadlock at message {rank.posted} of {len(plan.messages)}, "
            f"task {rank.work_done} of {len(plan.work)}"
        )
    groups, peers = range(plan.num_groups), range(plan.num_ranks)
    wanted = Counter({("attend", group, plan.rank): 1 for group in groups})
    wanted.update((step, group, peer) for step in ("produce", "consume") for group in groups for peer in peers)
    if rank.done != wanted:
        different = sorted((rank.done - wanted) | (wanted - rank.done))
        raise ScheduleError(f"rank {plan.rank}: not done exactly once: {different}")
