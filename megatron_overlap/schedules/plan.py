"""Plan of one rank: its messages and its computation, in order."""

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.layout import Chunk, ChunkLayout

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
Pattern = Literal["ring", "direct", "serial"]
Split = Literal["edge", "all"]


@dataclass(frozen=True, slots=True)
class Message:
    """One chunk to send and one chunk to receive, posted together. A rank posts its messages in plan order.

    Attributes:
        send: the chunk that is sent.
        to: rank that receives it.
        recv: the chunk that is received. In a reduce-scatter it is a partial sum of that chunk. In an all-reduce it is
            a partial sum of an own chunk, or the complete sum of a chunk of another owner.
        source: rank that sends it.
        after_work: the send may start when `work[:after_work]` is done; 0 means at once.
        after_message: earlier message whose received chunk this send forwards; None if it forwards no chunk.
        not_before: a transport on a device enqueues the message when `work[:not_before]` is enqueued. With one hardware
            queue (CUDA_DEVICE_MAX_CONNECTIONS=1) work that is enqueued after a message starts after it.
    """

    send: Chunk
    to: int
    recv: Chunk
    source: int
    after_work: int = 0
    after_message: int | None = None
    not_before: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """One unit of computation: a GEMM over the rows of `chunks`, and the partial sums that are added to its result.

    Attributes:
        chunks: chunks whose rows are one contiguous run, in row order: consecutive parts of one owner, or in an
            all-reduce consecutive owners of one part. Empty if the unit only adds. A serial plan has one unit with all
            chunks.
        needs: messages that must be received before the GEMM reads its input (all-gather).
        adds: messages whose partial sums are added after the GEMM (reduce-scatter and all-reduce).
    """

    chunks: tuple[Chunk, ...]
    needs: tuple[int, ...] = ()
    adds: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """Messages and computation of one rank in one overlapped collective. Immutable."""

    collective: Collective
    pattern: Pattern
    num_ranks: int
    rank: int
    chunks_per_rank: int
    messages: tuple[Message, ...]
    work: tuple[Work, ...]

    def layout(self, num_rows: int) -> ChunkLayout:
        """Return the row bounds of every chunk. A gather has a small last part, a scatter a small first part."""
        small: Literal["first", "last"] = "last" if self.collective == "all_gather" else "first"
        return ChunkLayout(num_rows, self.num_ranks, self.chunks_per_rank, small)
