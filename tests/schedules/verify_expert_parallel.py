"""Executes the expert-parallel plans of all ranks symbolically, and proves them or reports the fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from megatron_overlap.schedules.expert_parallel import MIN_PIECE_ROWS, ExpertPlan, Segments
from megatron_overlap.schedules.plan import Message
from tests.schedules.verify import ScheduleError


class Row(NamedTuple):
    """Token `index` of rank `source` for local expert `expert` of rank `owner`."""

    source: int
    owner: int
    expert: int
    index: int


@dataclass(slots=True)
class _Rank:
    plan: ExpertPlan
    tokens: dict[int, Row]
    """What each row of the tokens is."""
    transfers: tuple[Message, ...]
    inputs: dict[int, Row] = field(default_factory=dict)
    """Expert rows that are received or copied."""
    outputs: dict[int, Row] = field(default_factory=dict)
    """Expert rows whose result is computed."""
    results: dict[int, Row] = field(default_factory=dict)
    """Rows of the result."""
    posted: int = 0
    has_sent: bool = False
    has_received: bool = False
    steps_done: int = 0
    own_done: int = 0
    received: set[int] = field(default_factory=set)


def check_expert_plans(plans: Sequence[ExpertPlan], counts: Sequence[Sequence[Sequence[int]]]) -> int:
    """Executes one plan per rank and proves that together they compute every token once and return its result.

    Messages use a rendezvous, the strictest transport, as in `tests.schedules.verify`. Results leave at the earliest
    time that the plan permits.

    Args:
        plans: plan of rank 0, 1, ..., in order.
        counts: `counts[source][owner][expert]`, the routing.

    Returns:
        The number of messages of one rank that have rows.

    Raises:
        ScheduleError: names the rank and the message at fault.
    """
    if len({len(plan.messages) for plan in plans}) != 1:
        raise ScheduleError(f"messages of the ranks: {[len(plan.messages) for plan in plans]}: must be equal")
    ranks = [_Rank(plan, _tokens(source, counts[source]), plan.transfers) for source, plan in enumerate(plans)]
    for rank in ranks:
        _check_pieces(rank, counts)
    while True:
        moved = sum(_deliver(ranks, rank) for rank in ranks)
        if sum(_compute(rank) for rank in ranks) == 0 and moved == 0:
            break
    for rank in ranks:
        _finished(rank, counts)
    return max(sum(bool(message.sent) for message in plan.messages) for plan in plans)


def _tokens(source: int, counts: Sequence[Sequence[int]]) -> dict[int, Row]:
    rows = [
        Row(source, owner, expert, index)
        for owner, experts in enumerate(counts)
        for expert, count in enumerate(experts)
        for index in range(count)
    ]
    return dict(enumerate(rows))


def _check_pieces(rank: _Rank, counts: Sequence[Sequence[Sequence[int]]]) -> None:
    """No piece of an expert's rows of one source is small, unless it is all of them."""
    plan = rank.plan
    pieces = [(message.source, message.received) for message in plan.messages]
    pieces += [(plan.rank, piece.rows) for piece in plan.own]
    for source, segments in pieces:
        for segment in segments:
            whole = counts[source][plan.rank][segment.expert]
            if segment.rows < 1 or (segment.rows < MIN_PIECE_ROWS and segment.rows != whole):
                raise ScheduleError(f"rank {plan.rank}: a piece of {segment.rows} of {whole} rows of rank {source}")
    _check_steps(plan)


def _check_steps(plan: ExpertPlan) -> None:
    """The steps have all messages in order, and the rows of each where the messages place them."""
    if [k for step in plan.steps for k in step.messages] != list(range(len(plan.messages))):
        raise ScheduleError(f"rank {plan.rank}: steps of messages {[step.messages for step in plan.steps]}")
    firsts = list(accumulate((segment.rows for segment in plan.received), initial=0))
    for number, step in enumerate(plan.steps):
        placed = []
        for message in (plan.messages[k] for k in step.messages):
            first = message.arrives
            for segment in message.received:
                placed.append((segment, first))
                first += segment.rows
        computed = [(plan.received[each], firsts[each]) for group in step.received for each in group]
        if sorted(placed) != sorted(computed):
            raise ScheduleError(f"rank {plan.rank}, step {number}: computes {computed}, receives {placed}")
        for group in step.received:
            if list(group) != sorted(group, key=lambda each: (plan.received[each].expert, each)):
                raise ScheduleError(f"rank {plan.rank}, step {number}: {group} is not sorted")


def _deliver(ranks: list[_Rank], sender: _Rank) -> bool:
    """Delivers the current message of `sender` if it is also the current message of the receiver."""
    plan = sender.plan
    if sender.posted == 2 * len(plan.messages) or sender.has_sent:
        return False
    index, message = sender.posted, sender.transfers[sender.posted]
    if message.after_work > sender.steps_done:
        return False
    receiver = ranks[message.to]
    if receiver.posted != index or receiver.has_received:
        return False
    expected = receiver.transfers[index]
    where = f"rank {plan.rank}, message {index}"
    if expected.source != plan.rank or message.to == plan.rank:
        raise ScheduleError(f"{where}: rank {message.to} expects message {index} of rank {expected.source}")
    if expected.recv != message.send:
        raise ScheduleError(f"{where}: {message.send} arrives as {expected.recv}")
    combine, slot = divmod(index, len(plan.messages))
    if combine:
        sent, arrived = plan.messages[slot].received, receiver.plan.messages[slot].sent
        # At the earliest time of the send: results of later chunks do not exist then.
        _move(sender.outputs, sent, receiver.results, arrived, where)
    else:
        sent, arrived = plan.messages[slot].sent, receiver.plan.messages[slot].received
        _move(sender.tokens, sent, receiver.inputs, arrived, where)
    receiver.received.add(index)
    sender.has_sent = receiver.has_received = True
    for rank in (sender, receiver):
        if rank.has_sent and rank.has_received:
            rank.posted += 1
            rank.has_sent = rank.has_received = False
    return True


def _move(source: dict[int, Row], sent: Segments, sink: dict[int, Row], arrived: Segments, where: str) -> None:
    if [(segment.expert, segment.rows) for segment in sent] != [(each.expert, each.rows) for each in arrived]:
        raise ScheduleError(f"{where}: sends {sent}, which arrives as {arrived}")
    for start, stop in zip(sent, arrived, strict=True):
        for offset in range(start.rows):
            if start.start + offset not in source:
                raise ScheduleError(f"{where}: sends row {start.start + offset}, which does not exist yet")
            if stop.start + offset in sink:
                raise ScheduleError(f"{where}: overwrites row {stop.start + offset}")
            sink[stop.start + offset] = source[start.start + offset]


def _compute(rank: _Rank) -> bool:
    """Computes the next step if its messages are received and the own pieces before it are done."""
    plan = rank.plan
    done = rank.steps_done
    last = done == len(plan.steps)
    wanted = len(plan.own) if last else plan.steps[done].own_before
    if rank.own_done < wanted:
        piece = plan.own[rank.own_done]
        _move(rank.tokens, piece.tokens, rank.inputs, piece.rows, f"rank {plan.rank}, own rows")
        _compute_rows(rank, piece.rows)
        for tokens, rows in zip(piece.tokens, piece.rows, strict=True):
            rank.results.update(
                (tokens.start + offset, rank.outputs[rows.start + offset]) for offset in range(rows.rows)
            )
        rank.own_done += 1
        return True
    if last or not rank.received.issuperset(plan.steps[done].messages):
        return False
    for group in plan.steps[done].received:
        _compute_rows(rank, tuple(plan.received[number] for number in group))
    rank.steps_done += 1
    return True


def _compute_rows(rank: _Rank, segments: Segments) -> None:
    for segment in segments:
        for row in range(segment.start, segment.stop):
            token = rank.inputs.get(row)
            if token is None or (token.owner, token.expert) != (rank.plan.rank, segment.expert):
                raise ScheduleError(f"rank {rank.plan.rank}: expert {segment.expert} reads {token} in row {row}")
            if row in rank.outputs:
                raise ScheduleError(f"rank {rank.plan.rank}: computes row {row} twice")
            rank.outputs[row] = token


def _finished(rank: _Rank, counts: Sequence[Sequence[Sequence[int]]]) -> None:
    plan = rank.plan
    if rank.posted < 2 * len(plan.messages) or rank.steps_done < len(plan.steps):
        raise ScheduleError(f"rank {plan.rank}: deadlock at message {rank.posted}, step {rank.steps_done}")
    if plan.num_tokens != len(rank.tokens) or rank.results != rank.tokens:
        raise ScheduleError(f"rank {plan.rank}: results are not those of its tokens")
    expected = [
        Row(source, plan.rank, expert, index)
        for expert in range(len(plan.experts))
        for source in range(plan.num_ranks)
        for index in range(counts[source][plan.rank][expert])
    ]
    if plan.num_rows != len(expected) or rank.outputs != dict(enumerate(expected)):
        raise ScheduleError(f"rank {plan.rank}: expert rows are not sorted by expert and source")
    for segment in plan.experts:
        if {row.expert for row in expected[segment.start : segment.stop]} - {segment.expert}:
            raise ScheduleError(f"rank {plan.rank}: {segment} holds rows of another expert")
