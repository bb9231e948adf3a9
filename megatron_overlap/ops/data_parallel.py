"""Data parallel buckets: gradients summed and parameters gathered by messages that go straight to where they belong.

Source: Flash-Overlap / CommFuse (arXiv 2604.24013) claims data parallelism and gives no algorithm; this one is ours.
The schedules are those of the linear layers: every rank sends each shard of its bucket to the shard's owner, r+1 first,
and the owner adds. What hides the messages is the caller's: backward, the optimizer, the next forward.
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from heapq import heappop, heappush

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops.wgrad import add_wide
from megatron_overlap.schedules import ChunkLayout, all_gather_plan, reduce_scatter_plan

# What is left to add when the last message has landed is one piece: about a millisecond of a CPU core.
_PIECE_BYTES = 4 * 1024 * 1024
_MAX_PIECES = 16
_BLOCK = 1 << 18
"""Elements that are widened at once where narrow gradients are summed in fp32: stays in the cache."""

_scatter_plan = lru_cache(maxsize=64)(reduce_scatter_plan)
_gather_plan = lru_cache(maxsize=64)(all_gather_plan)


class GradientReduce:
    """Sums buckets over ranks, several on their way at once. Every rank begins the same buckets in the same order.

    On the CPU what has landed is added when a later bucket begins, or when somebody waits. On CUDA messages and sums
    follow each other on a stream of their own. A bucket's landing buffer, R-1 shards, is used again when it was added.

    Args:
        transport: carries the partial sums.
        gather: a second transport of the same ranks, which carries the sums back to all ranks: an all-reduce. None
            leaves each rank with the sum of its own shard: a reduce-scatter. A second one, because every rank must
            begin a transport's p2p_works in the same order, and sums are complete when they are.
        wide: narrow gradients are summed in fp32 and rounded once; otherwise after each addition, as a collective does.
        pieces: messages that a shard is cut into; None chooses by its size.
    """

    def __init__(
        self, transport: Transport, *, gather: Transport | None = None, wide: bool = False, pieces: int | None = None
    ) -> None:
        self.transport, self.gather, self.wide, self.pieces = transport, gather, wide, pieces
        self._pending: deque[Reduction] = deque()
        self._free_landings: list[int] = []
        self._num_landings = 0
        self._stream: torch.cuda.Stream | None = None

    def begin(self, bucket: torch.Tensor, *, mean: bool = False) -> Reduction:
        """Sends the other ranks' shards of `bucket`; `wait` on what is returned gives the sum.

        Equals `reduce_scatter(bucket)` in place: afterwards the own shard holds the sum over ranks, and the others what
        they held before. With `gather`, `all_reduce(bucket)`.

        Args:
            bucket: `[n]`, contiguous, n divisible by R unless there is a `gather`; not to be touched until `wait`.
            mean: divide the sum by R.

        Raises:
            ValueError: the bucket has another shape.
            TransportError: a peer is gone or late beyond the deadline.
        """
        size = self.transport.size
        if bucket.dim() != 1 or not bucket.is_contiguous():
            raise ValueError(f"bucket: shape {tuple(bucket.shape)}: must be one contiguous dimension")
        if self.gather is None and bucket.numel() % size:
            raise ValueError(f"bucket: {bucket.numel()} elements: not divisible by {size} ranks; pad it")
        if not bucket.is_cuda:
            self._settle_landed()
            reduction = Reduction(self, bucket, mean)
            self._pending.append(reduction)
            return reduction
        if self._stream is None:
            self._stream = torch.cuda.Stream(bucket.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            reduction = Reduction(self, bucket, mean)
            reduction.complete()
        return reduction

    def settle(self, last: Reduction) -> None:
        """Waits for what is to arrive and adds it, in the order of the buckets, until `last` is complete."""
        # With a gather all of them, before anybody waits for sums to come back: they travel together then.
        while self._pending and (self.gather is not None or last in self._pending):
            self._pending.popleft().add(wait=True)

    def close(self) -> None:
        """Waits for everything that is still on its way."""
        while self._pending:
            self._pending[0].wait()

    def take_landing(self, shape: tuple[int, int], like: torch.Tensor) -> tuple[int, torch.Tensor]:
        """A landing buffer and its number."""
        if self._free_landings:
            number = heappop(self._free_landings)
        else:
            number = self._num_landings
            self._num_landings += 1
        return number, self.transport.buffer_pool.take(f"bucket{number}", shape, like)

    def return_landing(self, number: int) -> None:
        """A landing buffer that has been read."""
        heappush(self._free_landings, number)

    def _settle_landed(self) -> None:
        # In the order of the buckets: sums that go back must not overtake each other.
        while self._pending and self._pending[0].add(wait=False):
            self._pending.popleft()


class Reduction:
    """One bucket on its way. Made by `GradientReduce.begin`."""

    def __init__(self, owner: GradientReduce, bucket: torch.Tensor, mean: bool) -> None:
        transport = owner.transport
        size, rank = transport.size, transport.rank
        self._owner, self._bucket, self._mean = owner, bucket, mean
        self._done: torch.cuda.Event | None = None
        self._gathering: Gathering | None = None
        self._pieces = owner.pieces or num_pieces(bucket, size)
        self._layout = ChunkLayout(bucket.numel(), size, self._pieces)
        plan = _scatter_plan(size, rank, chunks_per_rank=self._pieces)
        self._exchanges = plan.messages
        self._next = 0
        own = self._layout.shard_rows(rank)
        self._number, landing = owner.take_landing((size - 1, own), bucket)
        self._landing = []
        transfers = []
        for message in plan.messages:
            start, stop = self._layout.rows(message.send)
            into = slice(*self._layout.rows_in_shard(message.recv))
            self._landing.append(landing[(rank - message.source) % size - 1, into])
            transfers.append(Transfer(message, bucket[start:stop], self._landing[-1]))
        self._p2p_work = transport.begin(transfers, "gradient reduce-scatter")
        self._p2p_work.mark_ready(len(plan.work))

    def add(self, *, wait: bool) -> bool:
        """Adds the pieces that have landed, or with `wait` all; whether all are added."""
        while self._next < self._pieces:
            # Exchanges go by distance, then by piece: always the same order of summation.
            arrivals = range(self._next, len(self._exchanges), self._pieces)
            if not wait and not all(self._p2p_work.is_completed(k) for k in arrivals):
                return False
            for k in arrivals:
                self._p2p_work.wait(k)
            terms = [self._landing[k] for k in arrivals]
            if terms:
                start, stop = self._layout.rows(self._exchanges[arrivals[0]].recv)
                self._sum(self._bucket[start:stop], terms)
            self._next += 1
            if self._next == self._pieces:
                self._all_added()
        return True

    def _all_added(self) -> None:
        self._owner.return_landing(self._number)
        if self._owner.gather is not None:
            # The sums that come back go over what was sent.
            self._p2p_work.wait_all()
            self._gathering = Gathering(self._owner.gather, self._bucket, "gradient all-gather")

    def _sum(self, own: torch.Tensor, terms: list[torch.Tensor]) -> None:
        num_ranks = len(terms) + 1
        if not self._owner.wide or own.element_size() >= 4:
            for term in terms:
                own.add_(term)
            if self._mean:
                own.div_(num_ranks)
            return
        buffer_pool = self._owner.transport.buffer_pool
        like = torch.empty(0, dtype=torch.float32, device=own.device)
        for start in range(0, own.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            total = buffer_pool.take("bucket_sum", own[block].shape, like)
            total.copy_(own[block])
            for term in terms:
                add_wide(total, term[block], buffer_pool)
            own[block].copy_(total.div_(num_ranks) if self._mean else total)

    def complete(self) -> None:
        """Enqueues everything on the current CUDA stream."""
        self.add(wait=True)
        self._finish()
        self._done = torch.cuda.Event()
        self._done.record()

    def wait(self) -> None:
        """Returns when the sum may be read, and the whole bucket belongs to the caller again.

        Raises:
            TransportError: a peer is gone or late beyond the deadline.
        """
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
            return
        self._owner.settle(self)
        self._finish()

    def _finish(self) -> None:
        if self._gathering is None:
            self._p2p_work.wait_all()
        else:
            self._gathering.wait()


class Gathering:
    """The own shard of a bucket on its way to all ranks, and theirs on the way here.

    Equals `all_gather(shard)` in place: after `wait`, shard r of `bucket` is what rank r had there. Buckets share the
    link in the order in which they begin.

    Args:
        transport: carries the shards.
        bucket: `[n]`, contiguous; not to be touched until `wait`.
        op: name in error messages.
    """

    def __init__(self, transport: Transport, bucket: torch.Tensor, op: str = "parameter all-gather") -> None:
        self._exchanges = _gather_plan(transport.size, transport.rank).messages
        layout = ChunkLayout(bucket.numel(), transport.size)
        transfers = []
        for message in self._exchanges:
            send, recv = (slice(*layout.rows(chunk)) for chunk in (message.send, message.recv))
            transfers.append(Transfer(message, bucket[send], bucket[recv]))
        self._p2p_work = transport.begin(transfers, op)

    def wait(self) -> None:
        """Returns when all shards may be read, and the own one may be written.

        Raises:
            TransportError: a peer is gone or late beyond the deadline.
        """
        for index in range(len(self._exchanges)):
            self._p2p_work.wait(index)
        self._p2p_work.wait_all()


def num_pieces(bucket: torch.Tensor, num_ranks: int) -> int:
    """Messages that a shard is cut into, so that what waits to be added at the end is small."""
    shard_bytes = bucket.numel() * bucket.element_size() // num_ranks
    return max(1, min(_MAX_PIECES, shard_bytes // _PIECE_BYTES))
