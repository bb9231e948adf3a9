"""The messages of one part of a split micro-batch; `batch_overlap` has the operations.

Each message is whole. All-reduces are collectives of the group. On GPUs a reduce-scatter is one collective of NCCL
(`Transport.collectives`), and so is an all-gather unless copy engines move it (`PartGathers`). No GEMM is cut there. On
the host a GEMM multiplies own rows first if others have not arrived, and computes own rows last if its result is sent.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import BufferPool, Transport
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.diagnostics.consistency import ranks_text
from megatron_overlap.ops.call import product
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather
from megatron_overlap.ops.wgrad import DeferredWgrad, LateTensor, WgradTarget
from megatron_overlap.schedules.heuristics import MIN_COPY_BYTES

_WHOLE = LinearPlan(pattern="serial", chunks_per_rank=1)
"""One message to each rank, after the whole GEMM."""
_OWN_LAST = LinearPlan(pattern="direct", chunks_per_rank=1)
"""One message to each rank, before the GEMM of the own rows."""
MAX_DEFERRED = 4
"""Postponed products of two steps. More would keep more gathered rows."""

Rows = Literal["input", "output", "output gradient", "input gradient"]
"""What the messages of one operation carry. Backward gathers the input again."""


class PartWork:
    """The messages of one part that have started: `finish` completes `out`. This rank sends `num_bytes`.

    Args:
        wait: completes the messages; None: `out` is complete.
        is_ready: whether `wait` returns without waiting for a received message. False where a query would synchronise.
    """

    def __init__(
        self,
        out: torch.Tensor,
        num_bytes: int,
        wait: Callable[[], object] | None,
        is_ready: Callable[[], bool] = lambda: False,
    ) -> None:
        self.out, self.num_bytes, self._wait, self._is_ready = out, num_bytes, wait, is_ready

    @property
    def ready(self) -> bool:
        """As of `is_ready`, for `finish`."""
        return self._wait is None or self._is_ready()

    def finish(self) -> torch.Tensor:
        """Waits for all messages; returns `out`. Further calls return the same tensor."""
        if self._wait is not None:
            self._wait()
            self._wait = None
        return self.out

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`finish() @ b + bias`."""
        return product(self.finish(), b, bias)


class PartGather(PartWork):
    """An all-gather of the rows `[rows, K]` of one part, in one message to each rank.

    `full` is a buffer of the transport for the rows of all ranks; None: new memory.
    """

    def __init__(self, transport: Transport, shard: torch.Tensor, op: str, full: torch.Tensor | None = None) -> None:
        num_rows, features = shard.shape[0] * transport.size, shard.shape[1]
        row_bytes = features * shard.itemsize
        plan, layout = _WHOLE.schedule("all_gather", transport, num_rows, row_bytes, shard.device)
        repeats = full is not None
        out = shard.new_empty(num_rows, features) if full is None else full
        gather = PipelinedAllGather(transport, plan, (shard,), layout, (out,), op, whole=True, repeats=repeats)
        self._own, self._on_device = layout.shard(transport.rank), transport.on_device

        def wait() -> None:
            if not transport.on_device:
                gather.next_rows()
            gather.finish()

        super().__init__(out, (transport.size - 1) * shard.nbytes, wait, lambda: gather.ready)

    def matmul(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `PartWork`. On the host own rows are multiplied first if others have not arrived."""
        if self._on_device or self.ready:
            return super().matmul(b, bias)
        full, (start, stop) = self.out, self._own
        out = full.new_empty(full.shape[0], b.shape[1])
        product(full[start:stop], b, bias, out[start:stop])
        self.finish()
        for rows in slice(start), slice(stop, None):
            if out[rows].numel():
                product(full[rows], b, bias, out[rows])
        return out


class PartGathers:
    """All-gathers of both parts by copy engines, into buffers that take turns.

    A gather overwrites the rows of the one `NUM_BUFFERS` before. Postponed weight gradients that may read them are
    computed first. `min_bytes` are those of the rows of a rank, in a gather that copy engines carry.
    """

    NUM_BUFFERS = 12
    """`MAX_DEFERRED` weight gradients, two started gathers of each part, and four to spare."""

    def __init__(self, transport: Transport, min_bytes: int = MIN_COPY_BYTES) -> None:
        self._transport, self._min_bytes, self._num_started = transport, min_bytes, 0
        self._readers: list[DeferredWgrad | None] = [None] * self.NUM_BUFFERS

    def carries(self, shard: torch.Tensor) -> bool:
        """Whether copy engines carry the gather of `shard`."""
        return shard.nbytes >= self._min_bytes

    def start(self, shard: torch.Tensor, op: str, deferred_wgrad: DeferredWgrad) -> PartGather:
        """Starts a gather, whose rows only GEMMs of a step and weight gradients of `deferred_wgrad` read."""
        number = self._num_started % self.NUM_BUFFERS
        self._num_started += 1
        reader = self._readers[number]
        # Those of the same list are newer: it has at most `MAX_DEFERRED`.
        if reader is not None and reader is not deferred_wgrad:
            reader.run_while(lambda: True)
        self._readers[number] = deferred_wgrad
        shape = shard.shape[0] * self._transport.size, shard.shape[1]
        full = self._transport.buffer_pool.take(f"part {number}", shape, shard, symmetric=True)
        return PartGather(self._transport, shard, op, full)


class PartMessages(ABC):
    """The messages of one part in one step, in forward and in backward.

    Args:
        deferred_wgrad: gets the weight gradients of both parts of the step.
        serial: wait for each message where it starts, to measure the time without overlap.

    Attributes:
        gathers: ranks own rows, which the step gathers; otherwise each rank has all rows.
        num_owners: ranks that share the rows of an output.
        saved: own rows of the input that `part_output` saves for the weight gradient.
    """

    gathers = False
    num_owners = 1

    def __init__(self, buffer_pool: BufferPool, deferred_wgrad: DeferredWgrad, *, serial: bool) -> None:
        self.buffer_pool, self.deferred_wgrad = buffer_pool, deferred_wgrad
        self.saved: torch.Tensor | None = None
        self._serial = serial
        self._started: dict[Rows, PartWork] = {}

    @abstractmethod
    def gather(self, rows: Rows, shard: torch.Tensor) -> None:
        """Starts an all-gather of own rows `[..., K]`, if ranks own rows."""

    @abstractmethod
    def full(self, rows: Rows, own: torch.Tensor) -> PartWork:
        """The rows of all ranks: those of the started all-gather, or `own` `[rows, K]` if each rank has all."""

    @abstractmethod
    def reduce(self, rows: Rows, a: torch.Tensor, b: torch.Tensor | None = None) -> PartWork:
        """Starts the sum of `a` or `a @ b` over ranks: all rows, or own ones if ranks own rows."""

    def defer_wgrad(self, weight: torch.Tensor, dy: torch.Tensor, x: LateTensor, target: WgradTarget) -> None:
        """Postpones the weight gradient `dy.T @ x`."""
        self.deferred_wgrad.put(weight, dy, x, target)

    @abstractmethod
    def _run_deferred(self, work: PartWork) -> None:
        """Computes postponed weight gradients before the wait for `work`."""

    def has_started(self, rows: Rows) -> bool:
        """Whether messages with `rows` have started."""
        return rows in self._started

    def is_ready(self, rows: Rows) -> bool:
        """See `PartWork.ready`."""
        return self._started[rows].ready

    def take(self, rows: Rows) -> PartWork:
        """Removes started messages. The caller finishes them.

        Raises:
            RuntimeError: they were not started.
        """
        work = self._started.pop(rows, None)
        if work is None:
            raise RuntimeError(
                f"the {rows} of a split layer was not started: its linear layers did not run in the order of its "
                "forward; set overlap.tensor.split to none"
            )
        return work

    def finish(self, rows: Rows) -> torch.Tensor:
        """Waits for started messages, after postponed weight gradients that hide them."""
        return self._filled(rows).finish()

    def _filled(self, rows: Rows) -> PartWork:
        work = self.take(rows)
        self._run_deferred(work)
        return work

    def abandon(self) -> None:
        """Completes all messages. No layer uses their rows."""
        while self._started:
            self._started.popitem()[1].finish()

    def _start(self, rows: Rows, work: PartWork) -> PartWork:
        if rows in self._started:  # by a layer that runs twice in a step
            self._started[rows].finish()
        self._started[rows] = work
        if self._serial:
            work.finish()
        return work


class AllReduceMessages(PartMessages):
    """The messages without sequence parallelism: all-reduces. All ranks call them in program order.

    `num_wgrads` weight gradients are computed before backward waits for the input gradient; None: all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        buffer_pool: BufferPool,
        deferred_wgrad: DeferredWgrad,
        *,
        num_wgrads: int | None = 0,
        serial: bool = False,
    ) -> None:
        super().__init__(buffer_pool, deferred_wgrad, serial=serial)
        self._group, self._num_wgrads = group, num_wgrads

    def gather(self, rows: Rows, shard: torch.Tensor) -> None:
        """See `PartMessages`. Each rank has all rows."""

    def full(self, rows: Rows, own: torch.Tensor) -> PartWork:
        return PartWork(own.contiguous(), 0, None)

    def reduce(self, rows: Rows, a: torch.Tensor, b: torch.Tensor | None = None) -> PartWork:
        """See `PartMessages`. The wait raises a `TransportError` where the collective fails or exceeds its timeout."""
        out, size = a.clone() if b is None else a @ b, self._group.size()
        work = dist.all_reduce(out, group=self._group, async_op=True)

        def wait() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                ranks = ranks_text(dist.get_process_group_ranks(self._group))
                raise TransportError(f"all-reduce of one half of a micro-batch among ranks {ranks}: {error}") from error

        return self._start(rows, PartWork(out, 2 * (size - 1) * out.nbytes // size, wait))

    def _run_deferred(self, work: PartWork) -> None:
        self.deferred_wgrad.run(self._num_wgrads)


class GatherScatterMessages(PartMessages):
    """The messages under sequence parallelism: all-gathers and reduce-scatters.

    Args:
        transport: of the ranks. No other part uses it, since its buffers belong to one reduce-scatter at a time.
        deferred_wgrad: made with `num_terms=2`. Its terms are computed while a message has not arrived.
        gathers: carries the all-gathers; None: `transport` does.
    """

    gathers = True

    def __init__(
        self,
        transport: Transport,
        deferred_wgrad: DeferredWgrad,
        *,
        serial: bool = False,
        gathers: PartGathers | None = None,
    ) -> None:
        super().__init__(transport.buffer_pool, deferred_wgrad, serial=serial)
        self.num_owners = transport.size
        self._transport, self._copies = transport, gathers
        self._following: tuple[Rows, torch.Tensor] | None = None

    def gather(self, rows: Rows, shard: torch.Tensor) -> None:
        shard = shard.detach().reshape(-1, shard.shape[-1]).contiguous()
        op, collectives = f"all-gather of {rows} of a part", self._transport.collectives
        gathers = self._gathers_of(shard)
        gather: PartWork
        if gathers is not None:
            gather = gathers.start(shard, op, self.deferred_wgrad)
        elif collectives is None:
            gather = PartGather(self._transport, shard, op)
        else:
            full = shard.new_empty(shard.shape[0] * self._transport.size, shard.shape[1])
            work = collectives.all_gather(shard, full, op)
            gather = PartWork(full, full.nbytes - shard.nbytes, work.wait)
        self._start(rows, gather)

    def gather_next(self, rows: Rows, shard: torch.Tensor) -> None:
        """Starts an all-gather behind the one before.

        As a collective it starts when that one has arrived: in the same hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1)
        it would delay all work that is enqueued meanwhile.
        """
        if self._gathers_of(shard) is not None or self._transport.collectives is None:
            self.gather(rows, shard)
        else:
            self._following = rows, shard

    def _gathers_of(self, shard: torch.Tensor) -> PartGathers | None:
        """The all-gathers by copy engines if they carry the rows `shard`."""
        return self._copies if self._copies is not None and self._copies.carries(shard) else None

    def full(self, rows: Rows, own: torch.Tensor) -> PartWork:
        return self._filled(rows)

    def reduce(self, rows: Rows, a: torch.Tensor, b: torch.Tensor | None = None) -> PartWork:
        op, collectives = f"reduce-scatter of {rows} of a part", self._transport.collectives
        if collectives is None:
            # In one message to each rank.
            method = P2PMethod(self._transport, _WHOLE if self._serial else _OWN_LAST)
            scatter = method.reduce_scatter(a, op) if b is None else method.scatter(a, b, op)
            return self._start(rows, PartWork(scatter.out, scatter.num_bytes, scatter.finish, lambda: scatter.ready))
        terms = a.contiguous() if b is None else a @ b
        out = terms.new_empty(terms.shape[0] // self._transport.size, terms.shape[1])
        work = collectives.reduce_scatter(terms, out, op)
        return self._start(rows, PartWork(out, terms.nbytes - out.nbytes, work.wait))

    def defer_wgrad(self, weight: torch.Tensor, dy: torch.Tensor, x: LateTensor, target: WgradTarget) -> None:
        """See `PartMessages`. Computes the oldest terms if there are more than `MAX_DEFERRED`."""
        super().defer_wgrad(weight, dy, x, target)
        self.deferred_wgrad.run_while(lambda: self.deferred_wgrad.num_pending > MAX_DEFERRED)

    def _run_deferred(self, work: PartWork) -> None:
        self.deferred_wgrad.run_while(lambda: not work.ready)
        if self._following is not None:
            work.finish()
            following, self._following = self._following, None
            self.gather(*following)

    def abandon(self) -> None:
        self._following = None
        super().abandon()
