"""Plans the steps that each call of a `P2PWork` enqueues, where copy engines carry the messages.

The steps depend on the calls before. An operation that is repeated makes the same calls in the same order each time, so
`State` plans a call once and stores its steps.
"""

import copy
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, Queue
from megatron_overlap.schedules.plan import Message, end_of_call


@dataclass(slots=True)
class CopyMessage:
    """A message and its steps on flags.

    Attributes:
        own_rows: start and stop of the rows of a call that go to `lands` of the receiver, or come from `reads`.
        copies: tensors of the receiver and what they get, of a message without own rows.
        free: waits until the buffer of the receiver is free, or those of all receivers; empty if an earlier message of
            the operation does.
        sent: sets the flag of the receiver; empty if this rank sends no bytes.
        flag: the wait of the computing queue for the flag; None if this rank receives no bytes, or copies them itself.
        reads: where this rank copies from, at the sender.
        arrived: waits for the flag before that copy.
    """

    plan: Message
    own_rows: tuple[int, int] | None = None
    lands: torch.Tensor | None = None
    copies: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
    free: list[FlagStep] = field(default_factory=list)
    sent: list[FlagStep] = field(default_factory=list)
    flag: FlagStep | None = None
    reads: torch.Tensor | None = None
    arrived: list[FlagStep] = field(default_factory=list)


@dataclass(slots=True)
class CopyMessages:
    """The messages of operation `op`, in the order of the plan.

    Attributes:
        buffers_are_free: sets the flags of the senders.
        own_rows: start and stop of the own rows of each message.
        runs_of_own: consecutive runs of all own rows of a call: those of the messages, unless messages share rows.
    """

    op: str
    all: list[CopyMessage] = field(default_factory=list)
    buffers_are_free: list[FlagStep] = field(default_factory=list)
    own_rows: set[tuple[int, int]] = field(default_factory=set)
    runs_of_own: list[tuple[int, int]] = field(default_factory=list)

    def rows_of(
        self, own: torch.Tensor, cut: dict[tuple[int, int], torch.Tensor]
    ) -> dict[tuple[int, int], torch.Tensor]:
        """The own rows of the messages in `own`; `cut` has those that are cut already."""
        if not cut and self.own_rows:
            # For the host, one call of torch's dispatcher for all rows costs less than one for each.
            sizes = [stop - start for start, stop in self.runs_of_own]
            parts = (own,) if len(sizes) == 1 else torch.unsafe_split_with_sizes(own, sizes)
            cut = dict(zip(self.runs_of_own, parts, strict=True))
        missing = self.own_rows - cut.keys()
        return {**cut, **{rows: own[slice(*rows)] for rows in missing}} if missing else cut


class Queues(NamedTuple):
    """The queues of a rank."""

    computing: Queue
    sending: Queue
    receiving: Queue


Call = int | tuple[int, ...] | None
"""A call of a `P2PWork`: the work done of `mark_ready`, the messages of `wait`, or None for `wait_all`."""

RUN, COPY, COPY_OWN, MARK, AFTER = range(5)

Step = tuple[int, Callable[..., Any], Any, Any]
"""What a call enqueues: a kind, a function of a queue, and `a` and `b`.

- `RUN`: the prepared steps on flags `a`.
- `COPY`: the prepared copies `a`. `b`: starts and stops of the own rows from or to which they copy.
- `COPY_OWN`: a copy of all own rows to `Exchange.into`.
- `MARK`: the position of the queue, which gets the next number. `AFTER`: orders the queue after position `a`.
"""


class State:
    """How much of an operation is enqueued.

    Args:
        messages: of the operation.
        captured: a CUDA graph captures the operation.
        copies_own: the operation copies its own rows to `Exchange.into`.
        repeats: the same calls are made again. Otherwise a call changes this state and stores no steps.
    """

    def __init__(self, messages: CopyMessages, *, captured: bool, copies_own: bool, repeats: bool = True) -> None:
        self.messages, self._captured, self._copies_own, self._repeats = messages, captured, copies_own, repeats
        self._plans = [each.plan for each in messages.all]
        # Values of `Message.after_work`, ascending, from 0.
        self._ends_of_work = sorted({0, *(plan.after_work for plan in self._plans)})
        self._forwards = any(plan.after_messages for plan in self._plans)
        self.then: dict[Call, tuple[list[Step], State]] = {}
        """The calls made in this state: their steps, and the state after them."""
        # Until the call is planned, a step `RUN` has its queue and its flags: consecutive ones become one call of the
        # driver.
        self._steps: list[Any] = []
        self._num_sent, self._num_positions = 0, 0
        self._received = [False] * len(messages.all)
        # Positions of the computing queue, by the work done there.
        self._marks: dict[int, int] = {}
        self._work_done = -1
        # The position that the queue of sends follows, the one after the last send, and that of the receiving queue
        # after the copy of the own rows.
        self._sends_after: int | None = None
        self._sent: int | None = None
        self._own_copied: int | None = None

    def plan(self, call: Call, queues: Queues) -> "tuple[list[Step], State]":
        """Plan a call: its steps, and the state after it. The first call is `mark_ready` of no work."""
        after = self
        if self._repeats:
            after = copy.copy(self)
            after.then, after._received, after._marks = {}, self._received.copy(), self._marks.copy()
        after._steps = []
        if self._work_done < 0:
            after._begin(queues)
        if call is None:
            after._wait_all(queues)
        elif isinstance(call, int):
            after._mark_ready(call, queues)
        else:
            after._wait(call, queues)
        steps = [
            (RUN, each[1].run, each[1].prepare(each[2], captured=self._captured), None) if each[0] == RUN else each
            for each in after._steps
        ]
        if self._repeats:
            self.then[call] = steps, after
        return steps, after

    def _run(self, queue: Queue, flags: list[FlagStep]) -> None:
        if self._steps and self._steps[-1][0] == RUN and self._steps[-1][1] is queue:
            flags = self._steps.pop()[2] + flags
        self._steps.append((RUN, queue, flags, None))

    def _copy(self, queue: Queue, copies: list[Copy], own_rows: list[tuple[int, int]]) -> None:
        self._steps.append((COPY, queue.copy_all, queue.prepare_copies(copies, captured=self._captured), own_rows))

    def _mark(self, queue: Queue) -> int:
        """Add a step that notes the position of a queue; return the number of the position."""
        self._steps.append((MARK, queue.mark, None, None))
        self._num_positions += 1
        return self._num_positions - 1

    def _after(self, queue: Queue, position: int) -> None:
        self._steps.append((AFTER, queue.after, position, None))

    def _begin(self, queues: Queues) -> None:
        messages, receiving = self.messages, queues.receiving
        self._work_done = 0
        begun = self._marks[0] = self._mark(queues.computing)
        reads = any(each.reads is not None for each in messages.all)
        if messages.buffers_are_free or reads or self._copies_own:
            # Beside the computation: on a device a flag may be a copy.
            self._after(receiving, begun)
        if messages.buffers_are_free:
            self._run(receiving, messages.buffers_are_free)
            if self._captured:
                self._after(queues.sending, self._mark(receiving))
        if self._copies_own:
            self._steps.append((COPY_OWN, receiving.copy, None, None))
            self._own_copied = self._mark(receiving)

    def _mark_ready(self, work_done: int, queues: Queues) -> None:
        # First what the last work hides, with the positions before it.
        self._send_placed(work_done, self._work_done, queues)
        if work_done <= self._work_done:
            return
        # With one hardware queue, a mark that no message needs would delay later work until its queue reaches it.
        ends = self._ends_of_work
        first, stop = bisect_right(ends, self._work_done), bisect_right(ends, work_done)
        if first < stop:
            self._marks.update(dict.fromkeys(ends[first:stop], self._mark(queues.computing)))
        self._work_done = work_done
        self._send_placed(work_done, work_done, queues)

    def _send_placed(self, enqueued: int, done: int, queues: Queues) -> None:
        while call := self._next_call():
            plans = [each.plan for each in call]
            if any(plan.after_work > done or plan.not_before > enqueued for plan in plans) or not self._may_send():
                return
            self._send_next(queues)

    def _send_before(self, stop: int, queues: Queues) -> None:
        """Enqueues the sends that are ready, up to message `stop`, also before the work that hides them."""
        while self._num_sent < stop and self._may_send():
            self._send_next(queues)

    def _next_call(self) -> list[CopyMessage]:
        """The messages of the next call."""
        first = self._num_sent
        return self.messages.all[first : end_of_call(self._plans, first)]

    def _may_send(self) -> bool:
        return all(
            each.plan.after_work <= self._work_done and all(self._received[other] for other in each.plan.after_messages)
            for each in self._next_call()
        )

    def _send_next(self, queues: Queues) -> None:
        call, (computing, sending, receiving) = self._next_call(), queues
        self._num_sent += len(call)
        sends, reads = [each for each in call if each.sent], [each for each in call if each.reads is not None]
        if sends:
            free = [step for each in sends for step in each.free]
            if free:
                self._run(sending, free)
            # After the work that produces them.
            forwards = any(each.plan.after_messages for each in sends)
            position = self._mark(computing) if forwards else self._marks[max(each.plan.after_work for each in sends)]
            if position != self._sends_after:
                self._after(sending, position)
                self._sends_after = position
            of_own = [each for each in sends if each.lands is not None]
            copies: list[Copy] = [(each.lands, None) for each in of_own]
            copies += [copy for each in sends for copy in each.copies]
            if copies:
                self._copy(sending, copies, [each.own_rows for each in of_own if each.own_rows is not None])
            self._run(sending, [step for each in sends for step in each.sent])
        if reads:
            if self._captured:
                self._after(receiving, self._mark(sending))
            self._run(receiving, [step for each in reads for step in each.arrived])
            own_rows = [each.own_rows for each in reads if each.own_rows is not None]
            self._copy(receiving, [(None, each.reads) for each in reads], own_rows)
        if self._num_sent == len(self.messages.all) and self._sends_after is not None:
            self._sent = self._mark(sending)

    def _wait(self, messages: tuple[int, ...], queues: Queues) -> None:
        if not self._forwards:
            self._wait_together(messages, queues)
            return
        for message in messages:
            self._wait_together((message,), queues)
            self._send_placed(self._work_done, self._work_done, queues)

    def _wait_together(self, messages: tuple[int, ...], queues: Queues) -> None:
        """Waits for messages in one call of the driver."""
        last, all_messages = max(messages, default=-1), self.messages.all
        # The receiver of an earlier message may be the rank that sends this one: first the sends before it.
        self._send_before(last + 1, queues)
        waiting = [each for each in messages if not self._received[each]]
        if not waiting:
            return
        for each in waiting:
            self._received[each] = True
        flags = [flag for flag in (all_messages[each].flag for each in waiting) if flag is not None]
        if flags:
            if self._captured:
                self._after(queues.computing, self._mark(queues.sending))
            self._run(queues.computing, flags)
        if any(all_messages[each].reads is not None for each in waiting):
            self._after(queues.computing, self._mark(queues.receiving))
        if last == len(all_messages) - 1 and self._num_sent == len(all_messages):
            # Not in `wait_all`: with one hardware queue it would delay other messages behind the work since then.
            self._wait_sends(queues)

    def _wait_all(self, queues: Queues) -> None:
        if not all(self._received):
            self._wait(tuple(each for each, received in enumerate(self._received) if not received), queues)
        self._send_before(len(self._received), queues)
        assert self._num_sent == len(self._received), "a message was never marked ready"
        self._wait_sends(queues)
        if self._own_copied is not None:
            self._after(queues.computing, self._own_copied)
            self._own_copied = None

    def _wait_sends(self, queues: Queues) -> None:
        # Not the whole queue: it may have later operations, which wait for what the peers receive after this one.
        if self._sent is not None:
            self._after(queues.computing, self._sent)
            self._sent = None
