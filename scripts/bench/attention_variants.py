"""The ways to run attention, its projection and the reduce-scatter that bench/attention.py compares, on one data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from linear_variants import LinearCase, Run

from megatron_overlap.comm import Transport
from megatron_overlap.ops import LinearPlan, attention_linear_reduce_scatter, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.attention_projection import AttentionRows


@dataclass(frozen=True)
class Shape:
    """Of the whole layer; heads are divided over the ranks."""

    positions: int
    batch: int
    heads: int
    kv_heads: int
    head_size: int
    features: int


class _WholeAttention(torch.autograd.Function):
    """Causal attention as one kernel call each way: what every variant but query split starts with."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        context, lse = _attend(q, k, v)
        ctx.save_for_backward(q, k, v, context, lse)
        return context

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return _attend_backward(*ctx.saved_tensors, grads[0].contiguous())


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    context = q.new_empty(q.shape[0], q.shape[1], q.shape[2] * q.shape[3])
    lse = q.new_empty(q.shape[1], q.shape[0], q.shape[2], dtype=torch.float32)
    AttentionRows(q, k, v, True, q.shape[3] ** -0.5).forward(0, q.shape[0], context, lse)
    return context, lse


def _attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, context: torch.Tensor, lse: torch.Tensor, dcontext: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    dq = torch.empty_like(q)
    rows = AttentionRows(q, k, v, True, q.shape[3] ** -0.5)
    ((_, dk, dv),) = rows.backward(0, q.shape[0], dcontext, context, lse, dq)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


class AttentionCase(LinearCase):
    """One layer on one rank: data, and every way to run it forward, or forward and backward.

    The projection is the row-parallel case of bench/linear.py, with the attention's result as its input.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, transport: Transport, plan: LinearPlan, slices: int, backward: bool
    ) -> None:
        rows, width = shape.positions * shape.batch, shape.heads * shape.head_size
        super().__init__("gemm_rs", rows, width, shape.features, dtype, transport, plan, slices, backward)
        self.shape = shape
        generator = torch.Generator().manual_seed(100 + transport.rank)

        def random(heads: int) -> torch.Tensor:
            size = (shape.positions, shape.batch, heads // transport.size, shape.head_size)
            return torch.randn(*size, generator=generator).to(dtype)

        self.qkv = random(shape.heads), random(shape.kv_heads), random(shape.kv_heads)
        # As small as trained projections are: the result is of the size of the input.
        self.w = self.w / self.k**0.5
        # What the parts of backward read in variants that run it by itself.
        self.context, self.lse = _attend(*self.qkv)
        self.x = self.context.flatten(0, 1)

    def _attention(self) -> None:
        self.x = _attend(*self.qkv)[0].flatten(0, 1)

    def _forward(self) -> dict[str, Run]:
        linear = super()._forward()

        def after_attention(name: str) -> Run:
            def run() -> None:
                self._attention()
                linear[name]()

            return run

        def roof(post: Run, land: Any) -> Run:
            def run() -> None:
                posted = post()
                self._attention()
                linear["gemm"]()
                land(posted)

            return run

        full, shard = self.y_full, self.shard_f
        return {
            "compute": after_attention("gemm"),
            "comm_collective": linear["comm_collective"],
            "comm_p2p": linear["comm_p2p"],
            "serial": after_attention("serial"),
            "serial_p2p": lambda: self.query_split(
                LinearPlan(pattern="serial", chunks_per_rank=self.plan.chunks_per_rank)
            ),
            "sliced": after_attention("sliced"),
            "row_parallel": self.row_parallel,
            "query_split": lambda: self.query_split(self.plan),
            "roof_collective": roof(
                lambda: dist.reduce_scatter_tensor(shard, full, async_op=True), lambda work: work.wait()
            ),
            "roof_p2p": roof(lambda: self._bare(False, full, shard), lambda p2p_work: p2p_work.wait_all()),
        }

    def _backward(self) -> dict[str, Run]:
        def compute(gather: Any) -> Run:
            def run() -> None:
                done = gather()
                dcontext = torch.mm(self.dy_full, self.w).view(self.context.shape)
                grads = _attend_backward(*self.qkv, self.context, self.lse, dcontext)
                dw = torch.mm(self.dy_full.t(), self.x)
                done()
                del grads, dw

            return run

        def collective(async_op: bool) -> Any:
            work = dist.all_gather_into_tensor(self.dy_full, self.dy, async_op=async_op)
            return work.wait if async_op else lambda: None

        def sliced() -> None:
            dcontext = torch.empty_like(self.context)

            def use(rows: slice, gathered: torch.Tensor) -> None:
                self.dy_full[rows].copy_(gathered)
                torch.mm(gathered, self.w, out=dcontext.view(self.x.shape)[rows])

            self._gather_slices(self.dy, use)
            grads = _attend_backward(*self.qkv, self.context, self.lse, dcontext)
            dw = torch.mm(self.dy_full.t(), self.x)
            del grads, dw

        def bare() -> Any:
            return self._bare(True, self.dy_full, self.dy).finish

        return {
            "compute": compute(lambda: lambda: None),
            "comm_collective": lambda: collective(async_op=False),
            "comm_p2p": lambda: bare()(),
            "serial": compute(lambda: collective(async_op=False)),
            "sliced": sliced,
            "roof_collective": compute(lambda: collective(async_op=True)),
            "roof_p2p": compute(bare),
        }

    def row_parallel(self) -> list[torch.Tensor]:
        """Whole attention, then the overlapped row-parallel linear: the paper's middle variant."""

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return linear_reduce_scatter(_WholeAttention.apply(q, k, v), w, group=self.transport, plan=self.plan)

        return self._run(function)

    def query_split(self, plan: LinearPlan) -> list[torch.Tensor]:
        """The op that is measured."""

        def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return attention_linear_reduce_scatter(q, k, v, w, group=self.transport, plan=plan)

        return self._run(function)

    def _run(self, function: Any) -> list[torch.Tensor]:
        """The result, and with backward every gradient."""
        if not self.backward:
            with torch.no_grad():
                return [function(*self.qkv, self.w)]
        leaves = [tensor.detach().requires_grad_() for tensor in (*self.qkv, self.w)]
        y = function(*leaves)
        y.backward(self.dy.view(y.shape))
        return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]
