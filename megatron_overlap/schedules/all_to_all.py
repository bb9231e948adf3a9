"""The schedule of Ulysses attention: an all-to-all there, attention by head groups, an all-to-all back.

Source: the method is DeepSpeed-Ulysses (arXiv 2309.14509); hiding its all-to-alls behind the attention of other heads
is named, not described, by Flash-Overlap / CommFuse (arXiv 2604.24013). The order below is our own.

    compute  produce 0 .. G-1 | attend 0 | attend 1 | ... | attend G-1 | consume 0 .. G-1
    link               in 0 | in 1 | ... | in G-1 | out 0 | ... | out G-1

The link starts when the first piece is produced and ends with the last group's results; all that is inbound goes first,
so that it never waits for an attention while something else could travel. `in g` is needed by `attend g` alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.schedules.layout import Chunk
from megatron_overlap.schedules.plan import Message

Way = Literal["in", "out"]
Step = Literal["produce", "attend", "consume"]
AllToAllPattern = Literal["direct", "serial"]


class Piece(NamedTuple):
    """What one message carries: run `run` of the rows of rank `rows`, for the heads of rank `heads` in `group`."""

    way: Way
    group: int
    heads: int
    rows: int
    run: int


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """One piece out and one piece in, posted together; a rank's messages are posted in the plan's order.

    Attributes:
        send: the piece that leaves, for rank `to`.
        recv: the piece that arrives, from rank `source`.
        after_work: the send may leave when `work[:after_work]` is done.
    """

    send: Piece
    to: int
    recv: Piece
    source: int
    after_work: int

    def message(self, index: int) -> Message:
        """The message as transports know it."""
        return Message(
            Chunk(self.send.rows, index), self.to, Chunk(self.recv.rows, index), self.source, self.after_work
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of computation.

    Attributes:
        step: `produce` makes the own rows of the heads of `peers`; `attend` attends to the own heads with all rows;
            `consume` takes the own rows of the heads of `peers`.
        group: the head group.
        peers: ranks whose heads these are.
        needs: messages that must have landed before.
    """

    step: Step
    group: int
    peers: tuple[int, ...]
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllToAllPlan:
    """Everything one rank does in one pass of Ulysses attention. Immutable; printable by `describe`."""

    pattern: AllToAllPattern
    num_ranks: int
    rank: int
    num_groups: int
    num_runs: int
    messages: tuple[HeadMessage, ...]
    work: tuple[Task, ...]

    def describe(self) -> str:
        """The plan as text: a line a task, with the messages that it lets go."""
        lines = [
            f"ulysses {self.pattern}, rank {self.rank} of {self.num_ranks}, {self.num_groups} head group(s), "
            f"{len(self.messages)} message(s)"
        ]
        for index, task in enumerate(self.work):
            wait = f" after message {', '.join(map(str, task.needs))}" if task.needs else ""
            heads = f" for heads of {', '.join(map(str, task.peers))}" if task.step != "attend" else ""
            lines.append(f"  {task.step} {task.group}{heads}{wait}")
            lines += [
                f"  message {k}: {m.send.way} {m.send.group} to {m.to}, {m.recv.way} {m.recv.group} from {m.source}"
                for k, m in enumerate(self.messages)
                if m.after_work == index + 1
            ]
        return "\n".join(lines)


def ulysses_plan(
    num_ranks: int, rank: int, *, num_groups: int = 1, num_runs: int = 1, pattern: AllToAllPattern = "direct"
) -> AllToAllPlan:
    """Schedule of one pass for one rank.

    Args:
        num_ranks: size of the group, 1 to 64.
        rank: this rank in the group.
        num_groups: head groups.
        num_runs: runs of rows that each rank holds, see `SequenceLayout`: each is a message.
        pattern: `direct` as in the picture above; `serial` sends nothing before everything is produced, attends to
            nothing before everything has landed, and so on: the two all-to-alls fully exposed, for attribution.

    Raises:
        ValueError: an argument is out of range.
    """
    if not 1 <= num_ranks <= MAX_RANKS:
        raise ValueError(f"num_ranks: {num_ranks}: must be 1 to {MAX_RANKS}; use a smaller context-parallel group")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank: {rank}: must be 0 to {num_ranks - 1}")
    if num_groups < 1:
        raise ValueError(f"num_groups: {num_groups}: must be at least 1")
    if num_runs < 1:
        raise ValueError(f"num_runs: {num_runs}: must be at least 1")
    if pattern not in ("direct", "serial"):
        raise ValueError(f"pattern: {pattern}: use direct or serial")
    distances = range(1, num_ranks)
    # Others first: what is produced for the own heads needs no message.
    peers = tuple((rank + distance) % num_ranks for distance in (*distances, 0))
    sources = tuple((rank - distance) % num_ranks for distance in (0, *distances))
    work: list[Task] = []
    produced: dict[tuple[int, int], int] = {}
    for group in range(num_groups):
        # The first group leaves piece by piece: until its first message is there, the link has nothing to do.
        for part in [(peer,) for peer in peers] if group == 0 else [peers]:
            work.append(Task("produce", group, part))
            produced.update(((group, peer), len(work)) for peer in part)
    all_produced = len(work)
    attended = [all_produced + group + 1 for group in range(num_groups)]
    messages: list[HeadMessage] = []
    landed: dict[tuple[Way, int, int], list[int]] = {}
    ways: tuple[Way, ...] = ("in", "out")
    for way in ways:
        for group in range(num_groups):
            for distance in distances:
                to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
                after = produced[group, to] if way == "in" else attended[group]
                if pattern == "serial":
                    after = all_produced if way == "in" else attended[-1]
                for run in range(num_runs):
                    landed.setdefault((way, group, source), []).append(len(messages))
                    if way == "in":
                        send, recv = Piece(way, group, to, rank, run), Piece(way, group, rank, source, run)
                    else:
                        send, recv = Piece(way, group, rank, to, run), Piece(way, group, source, rank, run)
                    messages.append(HeadMessage(send, to, recv, source, after))

    def needed(way: Way, groups: range, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(k for group in groups for source in ranks for k in landed.get((way, group, source), ()))

    everything = range(num_groups)
    for group in everything:
        waits = everything if pattern == "serial" else range(group, group + 1)
        work.append(Task("attend", group, (rank,), needed("in", waits, sources)))
    for group in everything:
        for source in sources:
            needs = (
                needed("out", everything, sources) if pattern == "serial" else landed.get(("out", group, source), ())
            )
            work.append(Task("consume", group, (source,), tuple(needs)))
    return AllToAllPlan(pattern, num_ranks, rank, num_groups, num_runs, tuple(messages), tuple(work))
