"""Column- and row-parallel linears with fused kernels: forward, dgrad and wgrad, over symmetric memory.

The same programs as in `ops.linear`, whose docstrings say what they equal:

- column-parallel: forward gathers by copy engines into a GEMM whose tiles wait. Backward starts gathering again, runs
  dgrad as a GEMM that stores at the owners of its rows, then wgrad over the rows that have arrived, and sums dgrad
  last: what dgrad has on its way hides under wgrad.
- row-parallel: forward is a GEMM that stores at the owners, and a sum. Backward gathers the output gradient once: dgrad
  in the order of arrival, then wgrad over the same rows.

Source: Flux (arXiv 2406.06858) for the forward; it has no backward. Written for CUDA and not run on it yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from megatron_overlap.comm.arena import MAX_PARTS, gathered_bytes
from megatron_overlap.comm.symmetric import SymmetricOp, SymmetricTransport
from megatron_overlap.ops.common import Observer, WeightDone, check_operands
from megatron_overlap.schedules import ChunkLayout

_CHUNK_ROWS = 512
"""Rows of a comm tile: a message that a link needs some microseconds for, and whole GEMM tiles."""


def why_not_fused(x: torch.Tensor, num_rows: int, num_ranks: int) -> str | None:
    """What keeps one call from the fused kernels; None if nothing does."""
    if x.device.type != "cuda":
        return f"fused kernels need CUDA, not {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute in bf16 and fp16, not {x.dtype}"
    if num_rows < num_ranks:
        return f"{num_rows} rows are fewer than {num_ranks} ranks"
    return None


def fused_all_gather_linear(
    x_shard: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: SymmetricTransport,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `ops.all_gather_linear`, argument by argument.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    rows_per_index = check_operands(x_shard, w, bias, main_grad, "x_shard")
    flat = x_shard.reshape(-1, x_shard.shape[-1])
    y: torch.Tensor = _FusedAllGatherLinear.apply(flat, w, bias, transport, main_grad, weight_done, observer)
    if x_shard.dim() == 2:
        return y
    return y.view(y.shape[0] // rows_per_index, *x_shard.shape[1:-1], w.shape[0])


def fused_linear_reduce_scatter(
    x: torch.Tensor,
    w_shard: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    transport: SymmetricTransport,
    main_grad: torch.Tensor | None = None,
    weight_done: WeightDone | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals `ops.linear_reduce_scatter`, argument by argument.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.
        TransportError: an earlier op waited for a peer in vain.
    """
    rows_per_index = check_operands(x, w_shard, bias, main_grad, "x")
    if x.dim() > 2 and x.shape[0] % transport.size:
        raise ValueError(f"x: {x.shape[0]} positions: not divisible by {transport.size} ranks; pad the sequence")
    flat = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _FusedLinearReduceScatter.apply(flat, w_shard, transport, main_grad, weight_done, observer)
    if bias is not None:
        y = y + bias
    if x.dim() == 2:
        return y
    return y.view(y.shape[0] // rows_per_index, *x.shape[1:-1], w_shard.shape[0])


@dataclass(frozen=True, slots=True)
class _Shape:
    """What tables and tile shapes are made for; one entry of the cache."""

    num_rows: int
    num_ranks: int
    rank: int
    device: torch.device

    @property
    def layout(self) -> ChunkLayout:
        parts = self.num_rows // self.num_ranks // _CHUNK_ROWS
        return ChunkLayout(self.num_rows, self.num_ranks, max(1, min(MAX_PARTS, parts)))


@lru_cache(maxsize=256)
def _table(shape: _Shape, order: str, block: int | None) -> Any:
    """A table of row tiles on the device, made once: `arrival`, `departure`, or `own` rows."""
    from megatron_overlap.kernels.launch import RowTiles
    from megatron_overlap.schedules.tiles import arrival_order, departure_order, row_tiles

    chunks = (departure_order if order == "departure" else arrival_order)(shape.layout, shape.rank)
    if order == "own":
        chunks = [chunk for chunk in chunks if chunk.owner == shape.rank]
    return RowTiles.of(row_tiles(shape.layout, shape.rank, chunks, block), shape.device)


@lru_cache(maxsize=16)
def _device(device: torch.device) -> tuple[int, int]:
    """Ten times the compute capability, and the number of SMs."""
    properties = torch.cuda.get_device_properties(device)
    return properties.major * 10 + properties.minor, properties.multi_processor_count


def _config(rows: int, b: torch.Tensor) -> tuple[Any, int]:
    """Tile shape and number of blocks for a GEMM of `rows` rows with `b`."""
    from megatron_overlap.kernels.variants import ALIGNED, config_for

    capability, num_sms = _device(b.device)
    wide = ALIGNED[80 if capability < 90 else 90]
    depth, columns = b.shape
    aligned = columns % wide.block_n == 0 and depth % wide.block_k == 0
    tiles = -(-rows // wide.block_m) * -(-columns // wide.block_n)
    return config_for(capability, aligned=aligned, num_tiles=tiles, num_programs=num_sms), num_sms


class _Gather:
    """An all-gather that has been started, and the fused kernels that consume it."""

    def __init__(self, transport: SymmetricTransport, shard: torch.Tensor, num_rows: int, op: str) -> None:
        self._shape = _Shape(num_rows, transport.size, transport.rank, shard.device)
        half = gathered_bytes(num_rows, transport.size, shard.shape[1], shard.itemsize)
        self._op = transport.begin(half, op)
        self._status = transport.status
        self.full = self._op.push(shard, self._shape.layout)

    def _waits(self) -> Any:
        from megatron_overlap.kernels.launch import Waits

        return Waits(self._op.flags, self._op.epoch, self._status)

    def gemm(self, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """`gathered @ b + bias`, in the order of arrival."""
        from megatron_overlap.kernels.ag_gemm import ag_gemm

        config, programs = _config(self.full.shape[0], b)
        out = self.full.new_empty(self.full.shape[0], b.shape[1])
        tiles = _table(self._shape, "arrival", config.block_m)
        ag_gemm(self.full, b, out, bias, tiles=tiles, waits=self._waits(), config=config, num_programs=programs)
        return out

    def weight_gradient(
        self, dy: torch.Tensor | None, x: torch.Tensor | None, w: torch.Tensor, main_grad: torch.Tensor | None
    ) -> torch.Tensor | None:
        """`dy.T @ x` where one of them (None) is what is gathered: into `main_grad`, or as a gradient of its own."""
        from megatron_overlap.kernels import variants
        from megatron_overlap.kernels.wgrad import wgrad

        capability, num_sms = _device(w.device)
        arch = max(known for known in variants.ARCHITECTURES if known <= capability)
        wide = variants.WGRAD[arch]
        aligned = w.shape[0] % wide.block_m == 0 and w.shape[1] % wide.block_n == 0
        out = torch.empty_like(w, memory_format=torch.contiguous_format) if main_grad is None else main_grad
        wgrad(
            self.full if dy is None else dy,
            self.full if x is None else x,
            out,
            chunks=_table(self._shape, "arrival", None),
            waits=self._waits(),
            config=wide if aligned else variants.WGRAD_ODD[arch],
            num_programs=num_sms,
            add=main_grad is not None,
        )
        return out if main_grad is None else None

    def done(self) -> None:
        """What has been enqueued is all that reads the gathered rows."""
        self._op.done()


class _Scatter:
    """A GEMM whose tiles go to their owners, and the sum of what landed here."""

    def __init__(self, transport: SymmetricTransport, a: torch.Tensor, b: torch.Tensor, op: str) -> None:
        from megatron_overlap.kernels.gemm_rs import Owners, gemm_to_owners

        self._transport = transport
        self._shape = _Shape(a.shape[0], transport.size, transport.rank, a.device)
        slot_rows = -(-a.shape[0] // transport.size)
        self._landing_shape = (transport.size, slot_rows, b.shape[1])
        self._dtype = a.dtype
        half = gathered_bytes(a.shape[0], transport.size, b.shape[1], a.itemsize)
        self._op: SymmetricOp = transport.begin(half, op)
        config, programs = _config(a.shape[0], b)
        landings, flags = self._op.addresses()
        self._parts = self._shape.layout.chunks_per_rank
        owners = Owners(
            landings=landings,
            flags=flags,
            counters=transport.counters(self._op.epoch),
            rank=transport.rank,
            parts=self._parts,
            slot_rows=slot_rows,
            epoch=self._op.epoch,
        )
        tiles = _table(self._shape, "departure", config.block_m)
        gemm_to_owners(a, b, tiles=tiles, owners=owners, config=config, num_programs=programs)

    def sum(self) -> torch.Tensor:
        """Own rows of the sum over ranks."""
        from megatron_overlap.kernels.gemm_rs import SUM_ROWS, sum_landed
        from megatron_overlap.kernels.launch import Waits

        landing = self._op.half(self._transport.rank, self._landing_shape, self._dtype)
        out = landing.new_empty(self._shape.layout.shard_rows(self._transport.rank), self._landing_shape[2])
        sum_landed(
            landing,
            out,
            tiles=_table(self._shape, "own", SUM_ROWS),
            waits=Waits(self._op.flags, self._op.epoch, self._transport.status),
            parts=self._parts,
            num_programs=_device(out.device)[1] * 4,
        )
        self._op.done()
        return out


def _weight_result(
    dw: torch.Tensor | None, main_grad: torch.Tensor | None, weight_done: WeightDone | None
) -> torch.Tensor | None:
    return dw if main_grad is None or weight_done is None else weight_done()


class _FusedAllGatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        bias: torch.Tensor | None,
        transport: SymmetricTransport,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        x = x.contiguous()
        gather = _Gather(transport, x, transport.size * x.shape[0], "all_gather_linear")
        y = gather.gemm(w.t(), bias)
        gather.done()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.use_bias, ctx.main_grad = transport, bias is not None, main_grad
        ctx.weight_done, ctx.observer = weight_done, observer
        if observer is not None:
            observer("forward", (transport.size - 1) * x.nbytes)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        dy = grads[0].contiguous()
        transport, observer = ctx.transport, ctx.observer
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        gather = scatter = None
        dx = dw = None
        if need_w:
            gather = _Gather(transport, x, dy.shape[0], "all_gather_linear wgrad")
        if need_x:
            scatter = _Scatter(transport, dy, w, "all_gather_linear dgrad")
        if gather is not None:
            dw = gather.weight_gradient(dy, None, w, ctx.main_grad)
            gather.done()
            dw = _weight_result(dw, ctx.main_grad, ctx.weight_done)
            if observer is not None:
                observer("wgrad", (transport.size - 1) * x.nbytes)
        if scatter is not None:
            dx = scatter.sum()
            if observer is not None:
                observer("dgrad", (dy.shape[0] - dx.shape[0]) * dx.shape[1] * dx.itemsize)
        dbias = dy.sum(0) if need_bias and ctx.use_bias else None
        return dx, dw, dbias, None, None, None, None


class _FusedLinearReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        w: torch.Tensor,
        transport: SymmetricTransport,
        main_grad: torch.Tensor | None,
        weight_done: WeightDone | None,
        observer: Observer | None,
    ) -> torch.Tensor:
        # The weight gradient reads rows of it as they lie.
        x = x if x.stride(-1) == 1 else x.contiguous()
        y = _Scatter(transport, x, w.t(), "linear_reduce_scatter").sum()
        ctx.save_for_backward(x, w)
        ctx.transport, ctx.main_grad = transport, main_grad
        ctx.weight_done, ctx.observer = weight_done, observer
        if observer is not None:
            observer("forward", (x.shape[0] - y.shape[0]) * w.shape[0] * y.itemsize)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = dw = None
        if need_x or need_w:
            shard = grads[0].contiguous()
            gather = _Gather(ctx.transport, shard, x.shape[0], "linear_reduce_scatter dgrad")
            if need_x:
                dx = gather.gemm(w)
            if need_w:
                dw = gather.weight_gradient(None, x, w, ctx.main_grad)
                dw = _weight_result(dw, ctx.main_grad, ctx.weight_done)
            gather.done()
            if ctx.observer is not None:
                # One gather serves both; it is counted with the first.
                for direction in ["dgrad"] * need_x + ["wgrad"] * need_w:
                    first = direction == "dgrad" or not need_x
                    ctx.observer(direction, (ctx.transport.size - 1) * shard.nbytes * first)
        return dx, dw, None, None, None, None
