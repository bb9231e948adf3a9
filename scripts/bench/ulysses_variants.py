"""The ways to run one attention layer under Ulysses that bench/ulysses.py compares, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import Projection, UlyssesPlan, flash_attention, ulysses_attention, ulysses_self_attention
from megatron_overlap.schedules import HeadLayout, ulysses_plan

Run = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """Of the layer: S, B, H, query and key/value heads, D."""

    sequence: int
    batch: int
    hidden: int
    heads: int
    kv_heads: int
    size: int


class UlyssesCase:
    """One layer on one rank: QKV projection, attention, output projection, and every way to run them.

    Args:
        groups: head groups of the sliced baseline.
        backward: forward and backward; both weights get gradients.
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, transport: Transport, plan: UlyssesPlan, groups: int, backward: bool
    ) -> None:
        self.shape, self.transport, self.plan, self.groups, self.backward = shape, transport, plan, groups, backward
        self.num_ranks = size = transport.size
        self.rows = shape.sequence // size
        mine = torch.Generator().manual_seed(1 + transport.rank)
        shared = torch.Generator().manual_seed(77)
        features = (shape.heads + 2 * shape.kv_heads) * shape.size

        def random(*dims: int, generator: torch.Generator = mine, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(*dims, generator=generator) * scale).to(dtype)

        self.x = random(self.rows, shape.batch, shape.hidden)
        self.dy = random(self.rows, shape.batch, shape.hidden)
        self.w_qkv = random(features, shape.hidden, generator=shared, scale=shape.hidden**-0.5)
        wide = shape.heads * shape.size
        self.w_out = random(shape.hidden, wide, generator=shared, scale=wide**-0.5)
        # What the pieces read and write when they run apart from each other.
        self.whole = random(shape.sequence, shape.batch, features // size)
        self.dwhole = random(shape.sequence, shape.batch, wide // size)
        self.context = random(self.rows * shape.batch, wide)
        self.dprojected = random(self.rows * shape.batch, features)

    def variants(self) -> dict[str, Run]:
        """Name to callable."""
        layouts = {True: self._messages(True), False: self._messages(False)}

        def comm_p2p() -> None:
            for forward in (True, False) if self.backward else (True,):
                self._fly(layouts[forward]).wait_all()

        def roof_p2p() -> None:
            for forward in (True, False) if self.backward else (True,):
                p2p_work = self._fly(layouts[forward])
                self._compute(forward)
                p2p_work.wait_all()

        def roof_collective() -> None:
            for forward in (True, False) if self.backward else (True,):
                works = self._collectives(async_op=True, forward=forward)
                self._compute(forward)
                for work in works:
                    work.wait()

        def compute() -> None:
            self._compute(True)
            if self.backward:
                self._compute(False)

        def comm_collective() -> None:
            self._collectives(async_op=False, forward=True)
            if self.backward:
                self._collectives(async_op=False, forward=False)

        return {
            "compute": compute,
            "comm_collective": comm_collective,
            "comm_p2p": comm_p2p,
            "serial": lambda: self.by_collectives(1),
            "serial_p2p": lambda: self.layer(UlyssesPlan(self.plan.num_groups, "serial")),
            "sliced": lambda: self.by_collectives(self.groups),
            "attention_only": self.attention_only,
            "overlap": lambda: self.layer(self.plan),
            "roof_collective": roof_collective,
            "roof_p2p": roof_p2p,
        }

    def layer(self, plan: UlyssesPlan) -> torch.Tensor:
        """The fused op."""
        shape = self.shape
        x, w_qkv, w_out = (t.detach().requires_grad_(self.backward) for t in (self.x, self.w_qkv, self.w_out))
        y = ulysses_self_attention(
            x,
            Projection(w_qkv),
            None,
            Projection(w_out),
            num_heads=shape.heads,
            num_kv_heads=shape.kv_heads,
            group=self.transport,
            plan=plan,
        )
        if self.backward:
            y.backward(self.dy)
        return y

    def attention_only(self) -> torch.Tensor:
        """The op that hides all-to-alls behind attention alone, between whole projections."""
        shape = self.shape
        x, w_qkv, w_out = (t.detach().requires_grad_(self.backward) for t in (self.x, self.w_qkv, self.w_out))
        q, k, v = self._split((x @ w_qkv.t()).unflatten(2, (shape.kv_heads, -1, shape.size)))
        y = ulysses_attention(q, k, v, group=self.transport, plan=self.plan).flatten(2) @ w_out.t()
        if self.backward:
            y.backward(self.dy)
        return y

    def _split(self, per_key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return per_key[:, :, :, :-2].flatten(2, 3), per_key[:, :, :, -2], per_key[:, :, :, -1]

    def by_collectives(self, groups: int) -> torch.Tensor:
        """torch's all-to-all: one there and one back, all exposed; or one a head group, each beside other groups."""
        shape, size, batch = self.shape, self.num_ranks, self.shape.batch
        layout = HeadLayout(shape.heads, shape.kv_heads, size, groups)
        assert layout.aligned, "key/value heads must be a multiple of ranks x groups"
        scale = shape.size**-0.5
        flat = self.x.flatten(0, 1)
        projected = (flat @ self.w_qkv.t()).view(self.rows, batch, groups, size, -1)
        arriving = [self._there(projected[:, :, g]) for g in range(groups)]
        results, saved = [], []
        for work, whole in arriving:
            work.wait()
            q, k, v = self._split(whole.unflatten(2, (-1, layout.queries_per_key + 2, shape.size)))
            out, keep = flash_attention.sequence_forward(q, k, v, causal=True, scale=scale)
            saved.append(keep)
            results.append(self._back(out.flatten(2)))
        context = self._collect(results)
        y = context @ self.w_out.t()
        if not self.backward:
            return y
        dy = self.dy.flatten(0, 1)
        dcontext = (dy @ self.w_out).view(self.rows, batch, groups, size, -1)
        arriving = [self._there(dcontext[:, :, g]) for g in range(groups)]
        dw_out = dy.t() @ context
        results = []
        for (work, whole), keep in zip(arriving, saved, strict=True):
            work.wait()
            grad = whole.unflatten(2, (-1, shape.size))
            dq, dk, dv = flash_attention.sequence_backward(keep, grad, causal=True, scale=scale)
            keys = dk.shape[2]
            parts = [dq.unflatten(2, (keys, -1)), dk.unsqueeze(3), dv.unsqueeze(3)]
            results.append(self._back(torch.cat(parts, dim=3).flatten(2)))
        dprojected = self._collect(results)
        dx = dprojected @ self.w_qkv
        dw_qkv = dprojected.t() @ flat
        del dx, dw_qkv, dw_out
        return y

    def _there(self, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """Own rows `[S/N, B, N, features]` of all heads to all rows `[S, B, features]` of own heads."""
        leaving = rows.permute(2, 0, 1, 3).contiguous()
        whole = leaving.new_empty(self.shape.sequence, self.shape.batch, leaving.shape[-1])
        return dist.all_to_all_single(whole, leaving.flatten(0, 1), async_op=True), whole

    def _back(self, rows: torch.Tensor) -> tuple[Any, torch.Tensor]:
        """And back: `[N x S/N, B, features]`, for each rank's heads."""
        rows = rows.contiguous()
        landing = torch.empty_like(rows)
        return dist.all_to_all_single(landing, rows, async_op=True), landing

    def _collect(self, results: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
        parts = []
        for work, landing in results:
            work.wait()
            parts.append(landing.view(self.num_ranks, self.rows * self.shape.batch, -1).transpose(0, 1))
        return torch.stack(parts, dim=1).flatten(1)

    def _compute(self, forward: bool) -> object:
        """All the arithmetic of one pass and nothing else."""
        shape = self.shape
        flat = self.x.flatten(0, 1)
        keys = shape.kv_heads // self.num_ranks
        q, k, v = self._split(self.whole.unflatten(2, (keys, -1, shape.size)))
        scale = shape.size**-0.5
        if forward:
            projected = flat @ self.w_qkv.t()
            self._kept = flash_attention.sequence_forward(q, k, v, causal=True, scale=scale)[1]
            return projected, self.context @ self.w_out.t()
        dy = self.dy.flatten(0, 1)
        first = dy @ self.w_out, dy.t() @ self.context
        grads = flash_attention.sequence_backward(
            self._kept, self.dwhole.unflatten(2, (-1, shape.size)), causal=True, scale=scale
        )
        return first, grads, self.dprojected @ self.w_qkv, self.dprojected.t() @ flat

    def _collectives(self, async_op: bool, forward: bool) -> list[Any]:
        """The two all-to-alls of one pass; in backward the wide one is the second."""
        del forward
        return [
            dist.all_to_all_single(torch.empty_like(tensor), tensor, async_op=async_op)
            for tensor in (self.whole, self.dwhole)
        ]

    def _messages(self, forward: bool) -> list[Transfer]:
        """The messages of the plan over buffers of their own, all free to leave."""
        plan = ulysses_plan(self.num_ranks, self.transport.rank)
        wide, narrow = self.whole, self.dwhole
        transfers = []
        for index, message in enumerate(plan.messages):
            tensor = wide if (message.send.direction == "in") == forward else narrow
            send = tensor[: self.rows]
            plain = message.message(index)
            free = type(plain)(plain.send, plain.to, plain.recv, plain.source)
            transfers.append(Transfer(free, send, torch.empty_like(send)))
        return transfers

    def _fly(self, transfers: list[Transfer]) -> Any:
        return self.transport.begin(transfers, "bare messages")
