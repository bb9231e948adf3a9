"""Data parallelism: buckets of gradients are summed, and of parameters gathered, by point-to-point messages.

Every rank sends each shard of its bucket to the owner of the shard, rank r + 1 first, and the owner adds. The caller
provides the computation that hides the messages: backward, the optimizer, the next forward.

Source: the schedules of the linear layers. Flash-Overlap / CommFuse (arXiv 2604.24013) names data parallelism but
gives no algorithm.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import count

import torch

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Exchange, Repeated, RepeatedTransfers, Transfer
from megatron_overlap.ops.call import repeated
from megatron_overlap.ops.wgrad import add_terms, add_wide
from megatron_overlap.schedules import Chunk, ChunkLayout, Plan, all_gather_plan, reduce_scatter_plan

# One piece remains to be added after the last message: about 1 ms of a CPU core.
_PIECE_BYTES = 4 * 1024 * 1024
_MAX_PIECES = 16
_BLOCK = 1 << 18
"""Elements per block where bf16 or fp16 gradients are summed in fp32, so that a block stays in the cache."""

_layout = lru_cache(maxsize=256)(ChunkLayout)


@lru_cache(maxsize=64)
def _plan(make: Callable[..., Plan], num_ranks: int, rank: int, chunks_per_rank: int = 1) -> Plan:
    """A plan whose messages are one call of NCCL, or one batch of copies: no work of the caller separates them.

    With one hardware queue each call of NCCL but the last would delay later work until it is complete.
    """
    plan = make(num_ranks, rank, chunks_per_rank=chunks_per_rank)
    return replace(plan, messages=tuple(replace(message, call=0) for message in plan.messages))


class GradientReduce:
    """Sums buckets over ranks, several at a time. Every rank begins the same buckets in the same order.

    Received shards are added when a later bucket begins, or in `wait`; on CUDA on a separate stream. The receive buffer
    of a bucket, R-1 shards, is reused after the sum. Over copy engines it is symmetric. Gathers have none: all run at
    once, so their buffers would hold all parameters again.

    Args:
        gather: a second transport of the same ranks, which carries the sums back to all ranks: an all-reduce. None: a
            reduce-scatter. It is a second one because ranks complete sums at different times, but begin the operations
            of a transport in the same order.
        wide: sum bf16 and fp16 gradients in fp32 and round once; otherwise round after each addition, as a collective.
        pieces: messages per shard; None chooses by its size.

    Raises:
        TransportError: by every method: a peer has ended or misses the deadline.
    """

    def __init__(
        self, transport: Transport, *, gather: Transport | None = None, wide: bool = False, pieces: int | None = None
    ) -> None:
        self.transport, self.gather, self.wide, self.pieces = transport, gather, wide, pieces
        self._pending: deque[Reduction] = deque()
        self._stream: torch.cuda.Stream | None = None

    def begin(self, bucket: torch.Tensor, *, mean: bool = False) -> Reduction:
        """Sends the shards of other ranks in `bucket`; `wait` of the result returns when the sum is complete.

        Equals `reduce_scatter(bucket)` in place: afterwards the own shard holds the sum over ranks, and the other
        shards are unchanged. With `gather`, `all_reduce(bucket)`.

        Args:
            bucket: `[n]`, contiguous, n divisible by R unless there is a `gather`; not read or written before `wait`.
            mean: divide the sum by R.

        Raises:
            ValueError: the bucket has another shape.
        """
        size = self.transport.size
        if bucket.dim() != 1 or not bucket.is_contiguous():
            raise ValueError(f"bucket: shape {tuple(bucket.shape)}: must be one contiguous dimension")
        if self.gather is None and bucket.numel() % size:
            raise ValueError(f"bucket: {bucket.numel()} elements: not divisible by {size} ranks; pad it")
        if bucket.is_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream(bucket.device)
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                reduction = Reduction(self, bucket, mean)
                # The work since the buckets before hides their messages. With one hardware queue
                # (CUDA_DEVICE_MAX_CONNECTIONS=1) a wait at their own begin would delay that work until they arrive.
                while self._pending:
                    self._pending.popleft().add(wait=True)
        else:
            # In the order of the buckets, because every rank must begin the gathers in the same order.
            while self._pending and self._pending[0].add(wait=False):
                self._pending.popleft()
            reduction = Reduction(self, bucket, mean)
        self._pending.append(reduction)
        return reduction

    @contextmanager
    def beside(self) -> Iterator[None]:
        """A context whose work runs on the stream of the sums; later work of the current stream follows it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        torch.cuda.current_stream().wait_stream(self._stream)

    def settle(self, last: Reduction) -> None:
        """Waits for the pending buckets and adds them, in order, until `last` is complete."""
        # With a gather all buckets, before a wait for the first sums: the sums then travel together.
        while self._pending and (self.gather is not None or last in self._pending):
            self._pending.popleft().add(wait=True)

    def close(self) -> None:
        """Waits for all pending buckets."""
        while self._pending:
            self._pending[0].wait()


class _Shards(Repeated):
    """The received shards of buckets of one layout in a buffer, and the messages of each such bucket."""

    def __init__(self, plan: Plan, layout: ChunkLayout, buffer: torch.Tensor) -> None:
        self._plan, self._layout, self._buffer = plan, layout, buffer

    def terms(self, owner: int) -> list[torch.Tensor]:
        """By piece, what `owner` receives, `[R - 1, elements]`: by distance of the source."""
        layout, others = self._layout, self._layout.num_ranks - 1
        lengths = [layout.num_chunk_rows(Chunk(owner, part)) for part in range(layout.chunks_per_rank)]
        terms = self._buffer[: sum(lengths) * others].split([length * others for length in lengths])
        return [each.view(others, length) for each, length in zip(terms, lengths, strict=True)]

    def build(self, own: torch.Tensor | None) -> list[Transfer]:
        assert own is not None
        rank, size = self._plan.rank, self._layout.num_ranks
        terms, transfers = [self.terms(owner) for owner in range(size)], []
        for message in self._plan.messages:
            to, part = message.send
            received = terms[rank][message.recv.part][(rank - message.source) % size - 1]
            lands = terms[to][part][(to - rank) % size - 1]
            send = own[slice(*self._layout.rows(message.send))]
            transfers.append(Transfer(message, send, received, lands=lands))
        return transfers


class Reduction:
    """The pending sum of one bucket. Made by `GradientReduce.begin`."""

    def __init__(self, owner: GradientReduce, bucket: torch.Tensor, mean: bool) -> None:
        transport, size, rank = owner.transport, owner.transport.size, owner.transport.rank
        self._owner, self._bucket, self._mean = owner, bucket, mean
        self._gathering: Gathering | None = None
        # The piece that is added last is small. On CUDA a sum is one kernel, after all messages.
        most_pieces = 1 if bucket.is_cuda else _MAX_PIECES
        self._pieces = owner.pieces or max(1, min(most_pieces, bucket.nbytes // size // _PIECE_BYTES))
        self._layout = layout = _layout(bucket.numel(), size, self._pieces)
        plan = _plan(reduce_scatter_plan, size, rank, self._pieces)
        self._messages = plan.messages
        self._next = 0
        pool = transport.buffer_pool
        self._name = next(name for number in count() if (name := f"bucket{number}") not in pool.in_use)
        pool.in_use.add(self._name)
        # Rank 0 has the longest shard.
        of = plan, layout, pool.take(self._name, (layout.shard_rows(0) * (size - 1),), bucket, symmetric=True)
        shards = repeated(transport, of, lambda: _Shards(*of))
        self._terms = shards.terms(rank)
        self._p2p_work = transport.begin(Exchange(shards, bucket), "gradient reduce-scatter")
        self._p2p_work.mark_ready(len(plan.work))

    def add(self, *, wait: bool) -> bool:
        """Adds the received pieces, or with `wait` all pieces. Returns whether all are added."""
        while self._next < self._pieces:
            # Messages are ordered by distance, then by piece, so the order of summation is fixed.
            messages = range(self._next, len(self._messages), self._pieces)
            if not wait and not all(self._p2p_work.is_completed(k) for k in messages):
                return False
            self._p2p_work.wait(*messages)
            if messages:
                own = slice(*self._layout.rows(self._messages[messages[0]].recv))
                self._sum(self._bucket[own], self._terms[self._next])
            self._next += 1
        self._owner.transport.buffer_pool.in_use.discard(self._name)
        if self._owner.gather is not None:
            # The gather overwrites the sent shards.
            self._p2p_work.wait_all()
            self._gathering = Gathering(self._owner.gather, self._bucket, "gradient all-gather")
        return True

    def _sum(self, own: torch.Tensor, terms: torch.Tensor) -> None:
        num_ranks, in_fp32 = len(terms) + 1, own.element_size() >= 4
        if own.is_cuda and (self._owner.wide or in_fp32):
            own = own.unsqueeze(0)
            add_terms(terms.unsqueeze(1), own, own, num_ranks if self._mean else 1)
            return
        if not self._owner.wide or in_fp32:
            for term in terms:
                own.add_(term)
            if self._mean:
                own.div_(num_ranks)
            return
        # By blocks that stay in the cache.
        buffer_pool = self._owner.transport.buffer_pool
        for start in range(0, own.numel(), _BLOCK):
            block = slice(start, start + _BLOCK)
            total = buffer_pool.take("bucket_sum", own[block].shape, own, dtype=torch.float32)
            total.copy_(own[block])
            for term in terms:
                add_wide(total, term[block], buffer_pool)
            own[block].copy_(total.div_(num_ranks) if self._mean else total)

    def wait(self) -> None:
        """Returns when the sum is complete and the caller may write to the bucket."""
        with self._owner.beside():
            self._owner.settle(self)
            if self._gathering is None:
                self._p2p_work.wait_all()
            else:
                self._gathering.wait()


class Gathering:
    """The pending all-gather of one bucket.

    Equals `all_gather(shard)` in place: after `wait`, shard r of `bucket` is the one of rank r. Buckets use the link in
    the order in which they begin. Errors are those of `GradientReduce`.

    Args:
        bucket: `[n]`, contiguous; not read or written before `wait`.
        op: name in error messages.
    """

    def __init__(self, transport: Transport, bucket: torch.Tensor, op: str = "parameter all-gather") -> None:
        plan = _plan(all_gather_plan, transport.size, transport.rank)
        layout = ChunkLayout(bucket.numel(), transport.size)
        self._messages = plan.messages
        shards = [bucket[slice(*layout.shard(owner))] for owner in range(transport.size)]
        transfers = [Transfer(each, shards[each.send.owner], shards[each.recv.owner]) for each in plan.messages]
        self._p2p_work = transport.begin(Exchange(RepeatedTransfers(transfers)), op)
        self._p2p_work.mark_ready(len(plan.work))

    def wait(self) -> None:
        """Returns when all shards are complete and the caller may write to the own one."""
        self._p2p_work.wait(*range(len(self._messages)))
        self._p2p_work.wait_all()
