"""Executes the plans of all ranks symbolically, and proves them or reports the fault."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from megatron_overlap.schedules.plan import Chunk, Message, Plan


class ScheduleError(ValueError):
    """A set of plans does not compute its collective."""


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a proof.

    Attributes:
        num_messages: messages of one rank (the same on every rank).
        tail_free: on every rank a GEMM can hide every message. An all-gather starts with a GEMM that needs no message.
            A reduce-scatter may send its last message, and an all-reduce its last partial sum, before its last GEMM.
        num_after_gemms: largest number of messages of a rank that can only be sent after its last GEMM. Positive for an
            all-reduce, which computes its last sums after that GEMM.
        peak_chunks_in_flight: largest number of chunks that a rank has received and not yet used, with the fastest
            communication and the latest computation that the plan permits: the required number of receive slots.
    """

    num_messages: int
    tail_free: bool
    num_after_gemms: int
    peak_chunks_in_flight: int


@dataclass(slots=True)
class _Rank:
    plan: Plan
    messages_done: int = 0
    has_sent: bool = False
    has_received: bool = False
    work_done: int = 0
    held: set[Chunk] = field(default_factory=set)
    received_by: dict[Chunk, tuple[int, ...]] = field(default_factory=dict)
    computed: Counter[Chunk] = field(default_factory=Counter)
    partial: dict[Chunk, Counter[int]] = field(default_factory=dict)
    whole: set[Chunk] = field(default_factory=set)
    received: dict[int, Counter[int]] = field(default_factory=dict)
    unused: set[int] = field(default_factory=set)

    def current(self) -> Message | None:
        done = self.messages_done
        return self.plan.messages[done] if done < len(self.plan.messages) else None

    def ready_to_send(self) -> Message | None:
        message = self.current()
        if message is None or self.has_sent or message.after_work > self.work_done:
            return None
        return message


def check(plans: Sequence[Plan]) -> Proof:
    """Execute one plan per rank and prove that together they compute the collective.

    Messages use a rendezvous, the strictest transport: a rank starts its next message when both the send and the
    receive of the current one are matched by the peers. Plans that complete under this rule also complete with buffered
    transports.

    Proved: every rank computes every chunk once (all-gather), or the owner of a chunk sums it once from every rank
    (reduce-scatter), and every rank receives every sum (all-reduce). No rank sends a chunk that it does not hold or an
    incomplete sum, or reads a chunk that is not received. No deadlock occurs. Every message that is sent is received.
    All ranks put the same messages in one call.

    Args:
        plans: plan of rank 0, 1, ..., in order.

    Raises:
        ScheduleError: names the rank and the message or unit of work at fault.
    """
    size = len(plans)
    for index, plan in enumerate(plans):
        if plan.num_ranks != size or plan.rank != index or plan.collective != plans[0].collective:
            raise ScheduleError(
                f"plan {index} of {size} is for rank {plan.rank} of {plan.num_ranks}, {plan.collective}"
            )
        for k, (earlier, later) in enumerate(pairwise(plan.messages), start=1):
            if later.after_work < earlier.after_work:
                raise ScheduleError(f"rank {index}, message {k}: may be sent before message {k - 1}, which precedes it")
            if earlier.call is None or earlier.call != later.call:
                continue
            if (later.after_work, later.not_before, later.after_messages) != (
                earlier.after_work,
                earlier.not_before,
                (),
            ):
                raise ScheduleError(f"rank {index}, message {k}: it is not ready with message {k - 1} of the same call")
        if [message.call for message in plan.messages] != [message.call for message in plans[0].messages]:
            raise ScheduleError(f"rank {index}: it has other calls than rank 0")
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
            # sum() instead of any(): every rank must try, also after the first delivery.
            moved = sum(_deliver(ranks, rank) for rank in ranks) > 0
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
    """Whether the message contains a partial sum. Otherwise it contains a gathered chunk or a complete sum."""
    if plan.collective == "all_reduce":
        return message.recv.owner == plan.rank
    return plan.collective == "reduce_scatter"


def _deliver(ranks: list[_Rank], sender: _Rank) -> bool:
    """Deliver the current message of `sender` if it is also the current message of the receiver."""
    message = sender.ready_to_send()
    if message is None:
        return False
    receiver = ranks[message.to]
    expected = receiver.current()
    if expected is None or receiver.has_received or expected.source != sender.plan.rank:
        return False
    where = f"rank {sender.plan.rank}, message {sender.messages_done}"
    if expected.recv != message.send:
        raise ScheduleError(f"{where}: sends {message.send} to rank {message.to}, which expects {expected.recv}")
    index = receiver.messages_done
    if index != sender.messages_done:
        raise ScheduleError(f"{where}: is message {index} of rank {message.to}; both ranks must number it alike")
    if _reduces(receiver.plan, expected):
        if message.send not in sender.partial:
            raise ScheduleError(f"{where}: sends a partial of {message.send}, which it does not hold")
        receiver.received[index] = sender.partial.pop(message.send)
        receiver.unused.add(index)
    else:
        _store(sender, receiver, message, where)
        receiver.received[index] = Counter()
        if sender.plan.collective == "all_gather":
            receiver.unused.add(index)
    sender.has_sent = receiver.has_received = True
    for rank in (sender, receiver):
        if rank.has_sent and rank.has_received:
            rank.messages_done += 1
            rank.has_sent = rank.has_received = False
    return True


def _store(sender: _Rank, receiver: _Rank, message: Message, where: str) -> None:
    """Store a gathered chunk or a complete sum at `receiver`.

    A sum is complete after every rank has sent its partial sum, so it never overwrites a partial sum that is not sent.
    """
    chunk = message.send
    if chunk not in sender.held and chunk not in sender.whole:
        raise ScheduleError(f"{where}: sends {chunk}, which it does not hold")
    # This function runs messages one by one, but a transport sends as early as the plan permits.
    if message.after_messages != sender.received_by.get(chunk, ()):
        raise ScheduleError(f"{where}: sends {chunk} after {message.after_messages}, which do not deliver it")
    index = sender.messages_done
    if chunk in receiver.held:
        raise ScheduleError(f"rank {receiver.plan.rank}, message {index}: receives {chunk} a second time")
    receiver.held.add(chunk)
    receiver.received_by[chunk] = (index,)


def _work(rank: _Rank) -> bool:
    """Run the next unit of work if the messages that it needs are received."""
    plan = rank.plan
    if rank.work_done == len(plan.work):
        return False
    work = plan.work[rank.work_done]
    if any(k not in rank.received for k in (*work.needs, *work.adds)):
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
        rank.partial[chunk].update(rank.received[k])
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
    if rank.messages_done < len(plan.messages) or rank.work_done < len(plan.work):
        raise ScheduleError(
            f"rank {plan.rank}: deadlock at message {rank.messages_done} of {len(plan.messages)}, "
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
                raise ScheduleError(f"rank {plan.rank}: never receives the sum of {chunk}")


def describe(plan: Plan) -> str:
    """The plan as text: one line per unit of work, with the messages that may start before it."""
    lines = [
        f"{plan.collective} {plan.pattern}, rank {plan.rank} of {plan.num_ranks}, "
        f"{plan.chunks_per_rank} chunk(s) per rank, {len(plan.messages)} message(s)"
    ]
    listed = 0
    for index, work in enumerate(plan.work):
        while listed < len(plan.messages) and plan.messages[listed].after_work <= index:
            message = plan.messages[listed]
            lines.append(
                f"  message {listed}: send {_chunk_name(message.send)} to {message.to}, "
                f"receive {_chunk_name(message.recv)} from {message.source}"
            )
            listed += 1
        wait = f" after message {', '.join(map(str, work.needs))}" if work.needs else ""
        add = f", add message {', '.join(map(str, work.adds))}" if work.adds else ""
        compute = f"compute {' '.join(map(_chunk_name, work.chunks))}" if work.chunks else "finish"
        lines.append(f"  {compute}{wait}{add}")
    lines += [
        f"  message {k}: send {_chunk_name(m.send)} to {m.to}, receive {_chunk_name(m.recv)} from {m.source}"
        for k, m in enumerate(plan.messages[listed:], start=listed)
    ]
    return "\n".join(lines)


def _chunk_name(chunk: Chunk) -> str:
    return f"{chunk.owner}.{chunk.part}"
