"""A schedule as data: the messages and the work of one rank, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.layout import Chunk, ChunkLayout

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
Pattern = Literal["ring", "direct", "serial"]
Split = Literal["edge", "all"]


@dataclass(frozen=True, slots=True)
class Message:
    """One message out and one message in, posted together; a rank's messages are posted in the plan's order.

    Attributes:
        send: the chunk that leaves, for rank `to` of the group.
        recv: the chunk that arrives, from rank `source`; in a reduce-scatter it is a partial sum of that chunk, and in
            an all-reduce it is a partial sum of an own chunk, or the whole sum of another owner's.
        after_work: the send may leave when `work[:after_work]` is done; 0 means at once.
        after_message: the send forwards what this earlier message brought; None where it does not forward.
    """

    send: Chunk
    to: int
    recv: Chunk
    source: int
    after_work: int = 0
    after_message: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """One piece of computation: a GEMM over the rows of `chunks`, and what is added to its result.

    Attributes:
        chunks: chunks whose rows are one contiguous run, in the order of the rows: consecutive parts of one owner, or
            in an all-reduce consecutive owners of one part; empty where the piece only adds. A serial plan has one
            piece with all chunks.
        needs: messages that must have landed before the GEMM reads its input (all-gather).
        adds: messages whose received partial sums are added after the GEMM (reduce-scatter and
            all-reduce).
    """

    chunks: tuple[Chunk, ...]
    needs: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything one rank does in one overlapped collective. Immutable; printable by `describe`."""

    collective: Collective
    pattern: Pattern
    num_ranks: int
    rank: int
    chunks_per_rank: int
    messages: tuple[Message, ...]
    work: tuple[Work, ...]

    def layout(self, num_rows: int) -> ChunkLayout:
        """Rows of every chunk: a gather's last part is its smallest, a scatter's first."""
        small: Literal["first", "last"] = "last" if self.collective == "all_gather" else "first"
        return ChunkLayout(num_rows, self.num_ranks, self.chunks_per_rank, small)

    def describe(self) -> str:
        """The plan as text: a line per piece of work with the messages that may be in p2p_work beside it."""
        lines = [
            f"{self.collective} {self.pattern}, rank {self.rank} of {self.num_ranks}, "
            f"{self.chunks_per_rank} chunk(s) per rank, {len(self.messages)} message(s)"
        ]
        released = 0
        for index, work in enumerate(self.work):
            while released < len(self.messages) and self.messages[released].after_work <= index:
                message = self.messages[released]
                lines.append(
                    f"  message {released}: send {_name(message.send)} to {message.to}, "
                    f"receive {_name(message.recv)} from {message.source}"
                )
                released += 1
            wait = f" after message {', '.join(map(str, work.needs))}" if work.needs else ""
            add = f", add message {', '.join(map(str, work.adds))}" if work.adds else ""
            compute = f"compute {' '.join(map(_name, work.chunks))}" if work.chunks else "finish"
            lines.append(f"  {compute}{wait}{add}")
        lines += [
            f"  message {k}: send {_name(e.send)} to {e.to}, receive {_name(e.recv)} from {e.source}"
            for k, e in enumerate(self.messages[released:], start=released)
        ]
        return "\n".join(lines)


def _name(chunk: Chunk) -> str:
    return f"{chunk.owner}.{chunk.part}"
