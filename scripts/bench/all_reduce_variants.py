"""The ways to run one tensor-parallel linear without sequence parallelism that bench/linear.py compares."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from harness import Run, in_turn

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import LinearPlan, copy_linear, linear_all_reduce
from megatron_overlap.schedules import PartLayout, all_reduce_plan

OPS = ("gemm_ar", "copy_gemm")


class AllReduceCase:
    """One op on one rank: data, and every way to run it forward, or forward and backward.

    Args:
        op: `gemm_ar` (row-parallel, all-reduce in forward) or `copy_gemm` (column-parallel, all-reduce in backward).
        rows: rows M, the same on all ranks; features: the full K and N of the layer.
    """

    def __init__(
        self,
        op: str,
        rows: int,
        in_features: int,
        out_features: int,
        dtype: torch.dtype,
        transport: Transport,
        plan: LinearPlan,
        slices: int,
        backward: bool,
    ) -> None:
        size, rank = transport.size, transport.rank
        self.op, self.rows, self.backward = op, rows, backward
        self.transport, self.plan, self.slices = transport, plan, slices
        self.row = op == "gemm_ar"
        own = torch.Generator().manual_seed(2 + rank)
        same = torch.Generator().manual_seed(1)
        k = in_features // size if self.row else in_features
        f = out_features if self.row else out_features // size
        self.x = torch.randn(rows, k, generator=own if self.row else same).to(dtype)
        self.w = torch.randn(f, k, generator=own).to(dtype)
        self.dy = torch.randn(rows, f, generator=same if self.row else own).to(dtype)
        # What collectives sum without a GEMM: zeros, which stay finite however often they are summed.
        self.summed = torch.zeros(rows, f if self.row else k, dtype=dtype)

    def variants(self) -> dict[str, Run]:
        """Name to callable. What a column-parallel layer adds in forward is one GEMM to each."""
        communicating = self._communicating()
        if self.row:
            return in_turn(communicating, self._backward_of_row()) if self.backward else communicating
        alone = dict.fromkeys(("gemm", "serial", "sliced", "roof_collective", "roof_p2p"), self._gemm)
        return in_turn(alone, communicating)

    def run(self, plan: LinearPlan) -> torch.Tensor:
        """The overlapped op, both passes where `backward`; the result that is summed over ranks."""
        function = linear_all_reduce if self.row else copy_linear
        if not self.backward:
            with torch.no_grad():
                return function(self.x, self.w, group=self.transport, plan=plan)
        x, w = (tensor.detach().requires_grad_() for tensor in (self.x, self.w))
        y = function(x, w, group=self.transport, plan=plan)
        y.backward(self.dy)
        assert x.grad is not None
        return y if self.row else x.grad

    def _gemm(self) -> torch.Tensor:
        return torch.mm(self.x, self.w.t())

    def _summand(self, rows: slice = slice(None), out: torch.Tensor | None = None) -> torch.Tensor:
        """The GEMM whose result is summed: forward of a row-parallel layer, dgrad of a column-parallel one."""
        a, b = (self.x, self.w.t()) if self.row else (self.dy, self.w)
        return torch.mm(a[rows], b, out=out)

    def _rest(self) -> torch.Tensor | None:
        """The GEMM of the same pass that sums nothing."""
        return None if self.row else torch.mm(self.dy.t(), self.x)

    def _communicating(self) -> dict[str, Run]:
        """The pass that has the all-reduce."""

        def gemms() -> list[Any]:
            return [self._summand(), self._rest()]

        def serial() -> None:
            # Megatron's order: a row-parallel layer waits; a column-parallel one computes wgrad meanwhile.
            total = self._summand()
            work = dist.all_reduce(total, async_op=True)
            rest = self._rest()
            work.wait()
            del rest

        def sliced() -> None:
            total = torch.empty_like(self.summed)
            works = []
            for index in range(self.slices):
                rows = slice(self.rows * index // self.slices, self.rows * (index + 1) // self.slices)
                self._summand(rows, total[rows])
                works.append(dist.all_reduce(total[rows], async_op=True))
            rest = self._rest()
            for work in works:
                work.wait()
            del rest

        def roof_collective() -> None:
            work = dist.all_reduce(self.summed, async_op=True)
            made = gemms()
            work.wait()
            del made

        def roof_p2p() -> None:
            p2p_work = self._bare()
            made = gemms()
            p2p_work.wait_all()
            del made

        serial_plan = LinearPlan(pattern="serial", chunks_per_rank=self.plan.chunks_per_rank)
        return {
            "gemm": gemms,
            "comm_collective": lambda: dist.all_reduce(self.summed),
            "comm_p2p": lambda: self._bare().wait_all(),
            "serial": serial,
            "serial_p2p": lambda: self.run(serial_plan),
            "sliced": sliced,
            "overlap": lambda: self.run(self.plan),
            "roof_collective": roof_collective,
            "roof_p2p": roof_p2p,
        }

    def _backward_of_row(self) -> dict[str, Run]:
        def gemms() -> tuple[torch.Tensor, torch.Tensor]:
            return torch.mm(self.dy, self.w), torch.mm(self.dy.t(), self.x)

        return dict.fromkeys(("gemm", "serial", "sliced", "roof_collective", "roof_p2p"), gemms)

    def _bare(self) -> Any:
        """The messages of the all-reduce with nothing to wait for and nothing added."""
        size, rank = self.transport.size, self.transport.rank
        plan = all_reduce_plan(size, rank)
        layout = PartLayout(self.rows, size)
        transfers = []
        for index, message in enumerate(plan.messages):
            rows = layout.num_chunk_rows(message.recv)
            into = self.transport.buffer_pool.take(f"bare{index}", (rows, self.summed.shape[1]), self.summed)
            transfers.append(Transfer(message, self.summed[slice(*layout.rows(message.send))], into))
        p2p_work = self.transport.begin(transfers, "bare messages")
        p2p_work.mark_ready(len(plan.work))
        return p2p_work
