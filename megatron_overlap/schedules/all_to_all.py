"""The schedule of Ulysses attention: an all-to-all to heads, attention by head groups, an all-to-all to rows.

Source: DeepSpeed-Ulysses (arXiv 2309.14509). Flash-Overlap / CommFuse (arXiv 2604.24013) mentions the overlap of its
all-to-alls with the attention of other heads without a schedule. The order below is that of this project.

    compute  produce 0 .. G-1 | attend 0 | attend 1 | ... | attend G-1 | consume 0 .. G-1
    link               in 0 | in 1 | ... | in G-1 | out 0 | ... | out G-1

The link starts when the first piece is produced and ends with the results of the last group. All inbound pieces are
sent first, so the link never waits for an attention while another piece is ready. Only `attend g` needs `in g`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.schedules.layout import Chunk
from megatron_overlap.schedules.plan import Message

Direction = Literal["in", "out"]
Step = Literal["produce", "attend", "consume"]
AllToAllPattern = Literal["direct", "serial"]


class Piece(NamedTuple):
    """The content of one message: run `run` of the rows of rank `rows`, for the heads of rank `heads` in `group`."""

    direction: Direction
    group: int
    heads: int
    rows: int
    run: int


@dataclass(frozen=True, slots=True)
class HeadMessage:
    """One piece to send and one piece to receive, posted together. A rank posts its messages in plan order.

    Attributes:
        send: the piece that is sent.
        to: rank that receives it.
        recv: the piece that is received.
        source: rank that sends it.
        after_work: the send may start when `work[:after_work]` is done.
    """

    send: Piece
    to: int
    recv: Piece
    source: int
    after_work: int

    def message(self, index: int) -> Message:
        """The message in the format of the transports."""
        return Message(
            Chunk(self.send.rows, index), self.to, Chunk(self.recv.rows, index), self.source, self.after_work
        )


@dataclass(frozen=True, slots=True)
class Task:
    """One unit of computation.

    Attributes:
        step: `produce` computes the own rows for the heads of `peers`; `attend` computes attention of the own heads
            over all rows; `consume` reads the own rows of the results for the heads of `peers`.
        group: the head group.
        peers: ranks that own the heads.
        needs: messages that must be received first.
    """

    step: Step
    group: int
    peers: tuple[int, ...]
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AllToAllPlan:
    """Messages and computation of one rank in one pass of Ulysses attention. Immutable."""

    pattern: AllToAllPattern
    num_ranks: int
    rank: int
    num_groups: int
    num_runs: int
    messages: tuple[HeadMessage, ...]
    work: tuple[Task, ...]

    def describe(self) -> str:
        """The plan as text: one line per task, followed by the messages that may start after it."""
        lines = [
            f"ulysses {self.pattern}, rank {self.rank} of {self.num_ranks}, {self.num_groups} head group(s), "
            f"{len(self.messages)} message(s)"
        ]
        for index, task in enumerate(self.work):
            wait = f" after message {', '.join(map(str, task.needs))}" if task.needs else ""
            heads = f" for heads of {', '.join(map(str, task.peers))}" if task.step != "attend" else ""
            lines.append(f"  {task.step} {task.group}{heads}{wait}")
            lines += [
                f"  message {k}: {m.send.direction} {m.send.group} to {m.to}, "
                f"{m.recv.direction} {m.recv.group} from {m.source}"
                for k, m in enumerate(self.messages)
                if m.after_work == index + 1
            ]
        return "\n".join(lines)


def ulysses_plan(
    num_ranks: int, rank: int, *, num_groups: int = 1, num_runs: int = 1, pattern: AllToAllPattern = "direct"
) -> AllToAllPlan:
    """The schedule of one pass for one rank.

    Args:
        num_ranks: size of the group, 1 to 64.
        rank: this rank in the group.
        num_groups: head groups.
        num_runs: runs of rows that each rank holds, see `SequenceLayout`; one message each.
        pattern: `direct` as in the diagram above; `serial` runs one phase after another (produce, send, attend, send,
            consume), so both all-to-alls are fully exposed. Benchmarks use it to measure the overlap.

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
    # The own heads come last: they need no message.
    peers = tuple((rank + distance) % num_ranks for distance in (*distances, 0))
    sources = tuple((rank - distance) % num_ranks for distance in (0, *distances))
    work: list[Task] = []
    produced: dict[tuple[int, int], int] = {}
    for group in range(num_groups):
        # The first group is produced piece by piece, because the link is idle until its first piece is ready.
        for part in [(peer,) for peer in peers] if group == 0 else [peers]:
            work.append(Task("produce", group, part))
            produced.update(((group, peer), len(work)) for peer in part)
    all_produced = len(work)
    attended = [all_produced + group + 1 for group in range(num_groups)]
    messages: list[HeadMessage] = []
    received: dict[tuple[Direction, int, int], list[int]] = {}
    directions: tuple[Direction, ...] = ("in", "out")
    for direction in directions:
        for group in range(num_groups):
            for distance in distances:
                to, source = (rank + distance) % num_ranks, (rank - distance) % num_ranks
                after = produced[group, to] if direction == "in" else attended[group]
                if pattern == "serial":
                    after = all_produced if direction == "in" else attended[-1]
                for run in range(num_runs):
                    received.setdefault((direction, group, source), []).append(len(messages))
                    if direction == "in":
                        send, recv = Piece(direction, group, to, rank, run), Piece(direction, group, rank, source, run)
                    else:
                        send, recv = Piece(direction, group, rank, to, run), Piece(direction, group, source, rank, run)
                    messages.append(HeadMessage(send, to, recv, source, after))

    def needed(direction: Direction, groups: range, ranks: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(k for group in groups for source in ranks for k in received.get((direction, group, source), ()))

    all_groups = range(num_groups)
    for group in all_groups:
        waits = all_groups if pattern == "serial" else range(group, group + 1)
        work.append(Task("attend", group, (rank,), needed("in", waits, sources)))
    for group in all_groups:
        for source in sources:
            needs = (
                needed("out", all_groups, sources) if pattern == "serial" else received.get(("out", group, source), ())
            )
            work.append(Task("consume", group, (source,), tuple(needs)))
    return AllToAllPlan(pattern, num_ranks, rank, num_groups, num_runs, tuple(messages), tuple(work))
