"""Plays the plans of all ranks together and proves them, or names what is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_overlap.schedules.layout import Chunk
from megatron_overlap.schedules.plan import Message, Plan


class ScheduleError(ValueError):
    """A set of plans does not compute its collective."""


@dataclass(frozen=True, slots=True)
class Proof:
    """What playing the plans showed.

    Attributes:
        num_messages: messages of one rank (the same on every rank).
        tail_free: on every rank a GEMM is there to hide every message: an all-gather starts with a GEMM that needs
            none, a reduce-scatter has released its last one before its last GEMM starts, and an all-reduce its last
            partial sum.
        num_after_gemms: most messages of any rank that cannot leave before its last GEMM has ended. Not 0 for an
            all-reduce, whose last sums are made after it.
        peak_chunks_in_flight: most chunks that any rank had landed and not yet used, with communication as fast as
            the plan allows and computation as late: the receive slots that are enough.
    """

    num_messages: int
    tail_free: bool
    num_after_gemms: int
    peak_chunks_in_flight: int


@dataclass(slots=True)
class _Rank:
    plan: Plan
    exchanges_done: int = 0
    sent: bool = False
    received: bool = False
    work_done: int = 0
    held: set[Chunk] = field(default_factory=set)
    brought: dict[Chunk, int] = field(default_factory=dict)
    computed: Counter[Chunk] = field(default_factory=Counter)
    partial: dict[Chunk, Counter[int]] = field(default_factory=dict)
    whole: set[Chunk] = field(default_factory=set)
    landed: dict[int, Counter[int]] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)

    def current(self) -> Message | None:
        done = self.exchanges_done
        return self.plan.messages[done] if done < len(self.plan.messages) else None

    def ready_to_send(self) -> Message | None:
        message = self.current()
        if message is None or self.sent or message.after_work > self.work_done:
            return None
        return message


def check(plans: Sequence[Plan]) -> Proof:
    """Plays one plan per rank and proves that together they are the collective.

    An message is played as a rendezvous, the strictest transport: it holds up the rank's later messages until its
    send has met the matching receive of the peer and its receive the matching send. What runs under this rule runs
    under buffered transports too.

    Proved: every chunk is computed once on every rank (all-gather) or summed once from every rank at its owner
    (reduce-scatter), and every rank ends with every sum (all-reduce); no rank sends a chunk that it does not hold, or
    a sum that is not whole, or reads a chunk that has not landed; nothing deadlocks; every message that is sent is
    received.

    Args:
        plans: plan of rank 0, 1, ..., in order.

    Raises:
        ScheduleError: naming the rank and the message or piece of work at fault.
    """
    size = len(plans)
    for index, plan in enumerate(plans):
        if plan.num_ranks != size or plan.rank != index or plan.collective != plans[0].collective:
            raise ScheduleError(
                f"plan {index} of {size} is for rank {plan.rank} of {plan.num_ranks}, {plan.collective}"
            )
        for k, (earlier, later) in enumerate(pairwise(plan.messages), start=1):
            if later.after_work < earlier.after_work:
                raise ScheduleError(f"rank {index}, message {k}: may leave before message {k - 1}, which is in front")
    gather = plans[0].collective == "all_gather"
    parts = range(plans[0].chunks_per_rank)
    ranks = [_Rank(plan) for plan in plans]
    if gather:
        for rank in ranks:
            rank.held = {Chunk(rank.plan.rank, part) for part in parts}
    peak = 0
    while True:
        moved = True
        progress = False
        while moved:
            # All ranks get their turn: any() alone would stop at the first that moves.
            moved = sum(_exchange(ranks, rank) for rank in ranks) > 0
            progress = progress or moved
        peak = max(peak, *(len(rank.unused) for rank in ranks))
        if sum(_work(rank) for rank in ranks) == 0 and not progress:
            break
    for rank in ranks:
        _finished(rank, size)
    tail_free = all(_tail_free(plan) for plan in plans)
    after_gemms = max(sum(message.after_work > _last_gemm(plan) for message in plan.messages) for plan in plans)
    return Proof(len(plans[0].messages), tail_free, after_gemms, peak)


def _last_gemm(plan: Plan) -> int:
    return max(index for index, work in enumerate(plan.work) if work.chunks)


def _tail_free(plan: Plan) -> bool:
    if plan.collective == "all_gather":
        return not plan.work[0].needs
    last = _last_gemm(plan)
    return all(message.after_work <= last for message in plan.messages if _reduces(plan, message))


def _reduces(plan: Plan, message: Message) -> bool:
    """Whether partial sums travel; otherwise what travels is kept as it is."""
    if plan.collective == "all_reduce":
        return message.recv.owner == plan.rank
    return plan.collective == "reduce_scatter"


def _exchange(ranks: list[_Rank], sender: _Rank) -> bool:
    """Moves the message of `sender`'s current message if both ends have come to it."""
    message = sender.ready_to_send()
    if message is None:
        return False
    receiver = ranks[message.to]
    expected = receiver.current()
    if expected is None or receiver.received or expected.source != sender.plan.rank:
        return False
    where = f"rank {sender.plan.rank}, message {sender.exchanges_done}"
    if expected.recv != message.send:
        raise ScheduleError(f"{where}: sends {message.send} to rank {message.to}, which expects {expected.recv}")
    index = receiver.exchanges_done
    if index != sender.exchanges_done:
        raise ScheduleError(f"{where}: is message {index} of rank {message.to}; both ends must number it alike")
    if _reduces(receiver.plan, expected):
        if message.send not in sender.partial:
            raise ScheduleError(f"{where}: sends a partial of {message.send}, which it does not hold")
        receiver.landed[index] = sender.partial.pop(message.send)
        receiver.unused.add(index)
    else:
        _keep(sender, receiver, message, where)
        receiver.landed[index] = Counter()
        if sender.plan.collective == "all_gather":
            receiver.unused.add(index)
    sender.sent = True
    receiver.received = True
    for rank in (sender, receiver):
        if rank.sent and rank.received:
            rank.exchanges_done += 1
            rank.sent = rank.received = False
    return True


def _keep(sender: _Rank, receiver: _Rank, message: Message, where: str) -> None:
    """A gathered chunk, or the whole sum of one, reaches `receiver`.

    A sum is whole when every rank's partial has reached its owner: it never lands where a partial waits to be sent.
    """
    chunk = message.send
    if chunk not in sender.held and chunk not in sender.whole:
        raise ScheduleError(f"{where}: sends {chunk}, which it does not hold")
    # Exchanges are played one after the other; a transport sends as soon as the plan lets it.
    if message.after_message != sender.brought.get(chunk):
        raise ScheduleError(f"{where}: sends {chunk} after message {message.after_message}, which does not bring it")
    index = sender.exchanges_done
    if chunk in receiver.held:
        raise ScheduleError(f"rank {receiver.plan.rank}, message {index}: receives {chunk} a second time")
    receiver.held.add(chunk)
    receiver.brought[chunk] = index


def _work(rank: _Rank) -> bool:
    """Does the next piece of work if what it waits for has landed."""
    plan = rank.plan
    if rank.work_done == len(plan.work):
        return False
    work = plan.work[rank.work_done]
    if any(k not in rank.landed for k in (*work.needs, *work.adds)):
        return False
    where = f"rank {plan.rank}, work {rank.work_done}"
    for chunk in work.chunks:
        rank.computed[chunk] += 1
        if plan.collective != "all_gather":
            rank.partial[chunk] = Counter([plan.rank])
        elif chunk.owner != plan.rank and not any(plan.messages[k].recv == chunk for k in work.needs):
            raise ScheduleError(f"{where}: reads {chunk} without waiting for it")
    for k in work.adds:
        chunk = plan.messages[k].recv
        if chunk not in rank.partial:
            raise ScheduleError(f"{where}: adds to {chunk}, which it does not hold")
        rank.partial[chunk].update(rank.landed[k])
    rank.whole.update(
        chunk
        for chunk in {plan.messages[k].recv for k in work.adds}
        if rank.partial[chunk] == Counter(range(plan.num_ranks))
    )
    rank.unused -= {*work.needs, *work.adds}
    rank.work_done += 1
    return True


def _finished(rank: _Rank, size: int) -> None:
    plan = rank.plan
    if rank.exchanges_done < len(plan.messages) or rank.work_done < len(plan.work):
        raise ScheduleError(
            f"rank {plan.rank}: deadlock at message {rank.exchanges_done} of {len(plan.messages)}, "
            f"work {rank.work_done} of {len(plan.work)}"
        )
    parts = range(plan.chunks_per_rank)
    for chunk in (Chunk(owner, part) for owner in range(size) for part in parts):
        if rank.computed[chunk] != 1:
            raise ScheduleError(f"rank {plan.rank}: computes {chunk} {rank.computed[chunk]} times")
    if plan.collective != "all_gather":
        for part in parts:
            summed = rank.partial.get(Chunk(plan.rank, part), Counter())
            if summed != Counter(range(size)):
                raise ScheduleError(f"rank {plan.rank}: part {part} sums ranks {sorted(summed.elements())}")
    if plan.collective == "all_reduce":
        for chunk in (Chunk(owner, part) for owner in range(size) if owner != plan.rank for part in parts):
            if chunk not in rank.held:
                raise ScheduleError(f"rank {plan.rank}: never gets the sum of {chunk}")
