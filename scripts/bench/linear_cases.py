"""The methods of one tensor-parallel linear that bench/linear.py compares on the same data, with and without sequence
parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Run, in_turn

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import LinearPlan, all_gather_linear, copy_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.schedules import ChunkLayout, PartLayout, all_gather_plan, all_reduce_plan, reduce_scatter_plan

ALL_REDUCE_OPS = ("gemm_ar", "copy_gemm")


class LinearCase:
    """One op on one rank: data, and all variants of its forward, or of forward and backward.

    Args:
        op: `ag_gemm` (column-parallel) or `gemm_rs` (row-parallel).
        rows: gathered rows M; features: the full K and N of the layer.
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
        generator = torch.Generator().manual_seed(1 + rank)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator).to(dtype)

        column = op == "ag_gemm"
        self.k = in_features if column else in_features // size
        self.f = out_features // size if column else out_features
        shard = rows // size
        self.x = random(shard if column else rows, self.k)
        self.w = random(self.f, self.k)
        self.dy = random(rows if column else shard, self.f)
        # Buffers of collectives without a GEMM. GEMMs allocate their results, as in Megatron: the first
        # touch of fresh pages is part of every variant alike.
        self.x_full = random(rows, self.k)
        self.dy_full = random(rows, self.f)
        self.y_full = torch.empty(rows, self.f, dtype=dtype)
        self.dx_full = torch.empty(rows, self.k, dtype=dtype)
        self.shard_k = torch.empty(shard, self.k, dtype=dtype)
        self.shard_f = torch.empty(shard, self.f, dtype=dtype)

    def variants(self) -> dict[str, Run]:
        """Name to callable."""
        # The ops run both passes in one call and have no entry in `_backward`.
        return in_turn(self._forward(), self._backward()) if self.backward else self._forward()

    def _forward(self) -> dict[str, Run]:
        column = self.op == "ag_gemm"
        full, shard = (self.x_full, self.x) if column else (self.y_full, self.shard_f)

        def gemm() -> torch.Tensor:
            return torch.mm(self.x_full if column else self.x, self.w.t())

        def serial() -> None:
            if column:
                dist.all_gather_into_tensor(full, shard)
            y = gemm()
            if not column:
                dist.reduce_scatter_tensor(torch.empty_like(shard), y)

        def roof_collective() -> None:
            work = self._collective(column, full, shard, async_op=True)
            gemm()
            work.wait()

        def roof_p2p() -> None:
            p2p_works = [self._messages(column, full, shard)]
            gemm()
            self._wait_all(p2p_works)

        variants: dict[str, Run] = {
            "gemm": gemm,
            "comm_collective": lambda: self._collective(column, full, shard, async_op=False),
            "comm_p2p": lambda: self._wait_all([self._messages(column, full, shard)]),
            "serial": serial,
            "serial_p2p": lambda: self.run(LinearPlan(pattern="serial", chunks_per_rank=self.plan.chunks_per_rank)),
            "sliced": self._sliced_gather if column else self._sliced_scatter,
            "overlap": lambda: self.run(self.plan),
            "roof_collective": roof_collective,
            "roof_p2p": roof_p2p,
        }
        return variants

    def _backward(self) -> dict[str, Run]:
        """The backward of each variant. The ops run both passes in one call and have no entry."""
        column = self.op == "ag_gemm"

        def dgrad() -> torch.Tensor:
            return torch.mm(self.dy if column else self.dy_full, self.w)

        def wgrad() -> torch.Tensor:
            return torch.mm(self.dy.t(), self.x_full) if column else torch.mm(self.dy_full.t(), self.x)

        def gemm() -> tuple[torch.Tensor, torch.Tensor]:
            # Both stay allocated until the end of backward, as gradients do.
            return dgrad(), wgrad()

        def collective(async_op: bool) -> list[Any]:
            if column:
                return [
                    self._collective(True, self.x_full, self.x, async_op=async_op),
                    self._collective(False, self.dx_full, self.shard_k, async_op=async_op),
                ]
            return [self._collective(True, self.dy_full, self.dy, async_op=async_op)]

        def bare() -> list[Any]:
            if column:
                return [self._messages(True, self.x_full, self.x), self._messages(False, self.dx_full, self.shard_k)]
            return [self._messages(True, self.dy_full, self.dy)]

        def serial() -> None:
            if not column:
                collective(async_op=False)
                gemm()
                return
            # The overlap of Megatron: the gather beside dgrad, the reduce-scatter beside wgrad.
            gathered = self._collective(True, self.x_full, self.x, async_op=True)
            dx = dgrad()
            gathered.wait()
            scattered = self._collective(False, dx, torch.empty_like(self.shard_k), async_op=True)
            dw = wgrad()
            scattered.wait()
            del dx, dw

        def sliced() -> None:
            if column:
                serial()
            else:
                self._sliced_backward(wgrad)

        def roof_collective() -> None:
            works = collective(async_op=True)
            grads = gemm()
            for work in works:
                work.wait()
            del grads

        def roof_p2p() -> None:
            p2p_works = bare()
            grads = gemm()
            self._wait_all(p2p_works)
            del grads

        return {
            "gemm": gemm,
            "comm_collective": lambda: collective(async_op=False),
            "comm_p2p": lambda: self._wait_all(bare()),
            "serial": serial,
            "sliced": sliced,
            "roof_collective": roof_collective,
            "roof_p2p": roof_p2p,
        }

    def run(self, plan: LinearPlan) -> torch.Tensor:
        """The overlapped op, both passes where `backward`; its output."""
        function = all_gather_linear if self.op == "ag_gemm" else linear_reduce_scatter
        x = self.x.detach()
        if not self.backward:
            with torch.no_grad():
                return function(x, self.w, group=self.transport, plan=plan)
        w = self.w.detach().requires_grad_()
        y = function(x.requires_grad_(), w, group=self.transport, plan=plan)
        y.backward(self.dy)
        return y

    @staticmethod
    def _collective(gather: bool, full: torch.Tensor, shard: torch.Tensor, *, async_op: bool) -> Any:
        if gather:
            return dist.all_gather_into_tensor(full, shard, async_op=async_op)
        return dist.reduce_scatter_tensor(shard, full, async_op=async_op)

    def _messages(self, gather: bool, full: torch.Tensor, shard: torch.Tensor) -> Any:
        """The messages of the collective without dependencies and additions."""
        build = all_gather_plan if gather else reduce_scatter_plan
        plan = build(self.transport.size, self.transport.rank)
        layout = ChunkLayout(full.shape[0], self.transport.size)
        transfers = []
        if not gather:
            received = self.transport.buffer_pool.take("bare", full.shape, full)
        for message in plan.messages:
            send = slice(*layout.rows(message.send))
            source = shard if gather else full[send]
            target = (
                full[slice(*layout.rows(message.recv))] if gather else received[slice(*layout.shard(message.source))]
            )
            transfers.append(Transfer(message, source, target))
        p2p_work = self.transport.begin(transfers, "bare messages")
        p2p_work.mark_ready(len(plan.work))
        return p2p_work

    @staticmethod
    def _wait_all(p2p_works: list[Any]) -> None:
        for p2p_work in p2p_works:
            p2p_work.wait_all()

    def _slice_rows(self) -> list[tuple[int, int]]:
        shard = self.rows // self.transport.size
        cuts = [shard * i // self.slices for i in range(self.slices + 1)]
        return list(zip(cuts[:-1], cuts[1:], strict=True))

    def _sliced_gather(self) -> None:
        y = torch.empty_like(self.y_full)
        self._gather_slices(self.x, lambda rows, gathered: torch.mm(gathered, self.w.t(), out=y[rows]))

    def _gather_slices(self, source: torch.Tensor, use: Callable[[slice, torch.Tensor], object]) -> None:
        """The common overlap: one asynchronous all-gather for each slice; each slice is used when it has arrived."""
        size, shard = self.transport.size, self.rows // self.transport.size
        works = []
        for start, stop in self._slice_rows():
            name = f"slice{start}"
            gathered = self.transport.buffer_pool.take(name, (size, stop - start, source.shape[1]), source)
            work = dist.all_gather_into_tensor(gathered.flatten(0, 1), source[start:stop], async_op=True)
            works.append((work, gathered, start, stop))
        for work, gathered, start, stop in works:
            work.wait()
            for owner in range(size):
                use(slice(owner * shard + start, owner * shard + stop), gathered[owner])

    def _sliced_scatter(self) -> None:
        size, shard = self.transport.size, self.rows // self.transport.size
        works = []
        y_shard = torch.empty_like(self.shard_f)
        for start, stop in self._slice_rows():
            partial = self.transport.buffer_pool.take(f"slice{start}", (size, stop - start, self.f), self.x)
            for owner in range(size):
                rows = slice(owner * shard + start, owner * shard + stop)
                torch.mm(self.x[rows], self.w.t(), out=partial[owner])
            out = y_shard[start:stop]
            works.append(dist.reduce_scatter_tensor(out, partial.flatten(0, 1), async_op=True))
        for work in works:
            work.wait()

    def _sliced_backward(self, wgrad: Run) -> None:
        dx = torch.empty_like(self.dx_full)

        def use(rows: slice, gathered: torch.Tensor) -> None:
            self.dy_full[rows].copy_(gathered)
            torch.mm(gathered, self.w, out=dx[rows])

        self._gather_slices(self.dy, use)
        wgrad()


class AllReduceCase:
    """One op on one rank: data, and all variants of its forward, or of forward and backward.

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
        # Input of collectives without a GEMM: repeated sums of zeros stay finite.
        self.summed = torch.zeros(rows, f if self.row else k, dtype=dtype)

    def variants(self) -> dict[str, Run]:
        """Name to callable. The forward of a column-parallel layer adds one GEMM to each."""
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
            # The order of Megatron: a row-parallel layer waits; a column-parallel one computes wgrad meanwhile.
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
            p2p_work = self._messages()
            made = gemms()
            p2p_work.wait_all()
            del made

        serial_plan = LinearPlan(pattern="serial", chunks_per_rank=self.plan.chunks_per_rank)
        return {
            "gemm": gemms,
            "comm_collective": lambda: dist.all_reduce(self.summed),
            "comm_p2p": lambda: self._messages().wait_all(),
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

    def _messages(self) -> Any:
        """The messages of the all-reduce without dependencies and additions."""
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
