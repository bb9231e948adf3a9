"""Times an attention layer under Ulysses and its alternatives over links with a limited rate.

    python scripts/bench/ulysses.py --hosts 2 --gbps 1.0 --sequence 2048 --hidden 1024 --heads 16 --dtype bf16 \\
        --json ulysses.json

One rank a host, one thread a rank. Every figure is the median over rounds; each round runs all variants.
`compute` is the arithmetic of the layer, `comm` the faster of the all-to-alls of torch and bare messages, `limit` the
larger of both. `serial` is the order of the stock path, which overlaps no all-to-all.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Run, Timings, link_parser, rates_for, run_job, run_rates

from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.ops import (
    Projection,
    UlyssesPlan,
    flash_attention,
    ulysses_attention,
    ulysses_self_attention,
)
from megatron_overlap.schedules import HeadLayout, ulysses_plan
from tests.helpers import reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIRECTIONS = ("forward", "forward_backward")


@dataclass(frozen=True)
class Shape:
    """Shape of the layer: S, B, H, query and key/value heads, D."""

    sequence: int
    batch: int
    hidden: int
    heads: int
    kv_heads: int
    size: int


class UlyssesCase:
    """One layer on one rank: QKV projection, attention, output projection, in all variants.

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
        # Inputs of the parts when they run independently of each other.
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


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    run_rates(__file__, args, rates(args), print_row)


def rates(args: argparse.Namespace) -> list[float | None]:
    """Those asked for; for `--ratios` from the arithmetic of a forward, measured over loopback."""
    if args.loopback or not args.ratios:
        return [None] if args.loopback else args.gbps
    compute_ms = run_job(__file__, [*sys.argv[1:], "--probe"], args.hosts, None, args.timeout)["compute_ms"]
    heads = 2 * args.heads + 2 * args.kv_heads
    elements = args.sequence * args.batch * heads * args.hidden // args.heads
    moved = elements / args.hosts * DTYPES[args.dtype].itemsize * (args.hosts - 1) / args.hosts
    return rates_for(moved, compute_ms, args.ratios)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    shape = Shape(args.sequence, args.batch, args.hidden, args.heads, args.kv_heads, args.hidden // args.heads)
    plan = UlyssesPlan(args.groups)
    aligned = [g for g in range(1, args.slices + 1) if args.kv_heads % (transport.size * g) == 0]

    def case(direction: str) -> UlyssesCase:
        backward = direction == "forward_backward"
        return UlyssesCase(shape, DTYPES[args.dtype], transport, plan, aligned[-1], backward)

    if args.probe:
        compute_ms = Timings({"compute": case("forward").variants()["compute"]}, args.rounds, 2).ms("compute")
        out: dict[str, Any] = {"compute_ms": compute_ms}
    else:
        gate(case("forward"))
        out = {"rows": [measure(case(direction), direction, args) for direction in args.directions]}
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps(out))
    destroy_process_groups()


def gate(case: UlyssesCase) -> None:
    """Check the results before anything is timed."""
    group, shape = dist.group.WORLD, case.shape
    assert group is not None
    projected = case.x.float() @ case.w_qkv.float().t()
    q, k, v = case._split(projected.unflatten(2, (shape.kv_heads, -1, shape.size)))
    expected = (reference.ulysses_attention(q, k, v, group=group).flatten(2) @ case.w_out.float().t()).flatten(0, 1)
    named = {
        "overlap": case.layer(case.plan),
        "attention_only": case.attention_only(),
        "serial": case.by_collectives(1),
        "sliced": case.by_collectives(case.groups),
    }
    for name, got in named.items():
        error = (got.float().view(expected.shape) - expected).norm() / expected.norm()
        if not error < 4 * torch.finfo(case.x.dtype).eps:
            raise SystemExit(f"{name}: off by {error:.2e} of the reference: nothing is timed")


def measure(case: UlyssesCase, direction: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one direction."""
    variants = case.variants()
    exposed: list[float] = []
    overlap = variants["overlap"]

    def watched() -> None:
        before = case.transport.exposed_s
        overlap()
        exposed.append((case.transport.exposed_s - before) * 1e3)

    timings = Timings({**variants, "overlap": watched}, args.rounds, args.warmup)
    mine = torch.tensor(sorted(exposed[args.warmup :])[args.rounds // 2], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    faster = min(("comm_collective", "comm_p2p"), key=timings.ms)
    roof = min(("roof_collective", "roof_p2p"), key=timings.ms)
    compute, comm = timings.ms("compute"), timings.ms(faster)
    names = ("serial", "serial_p2p", "sliced", "attention_only", "overlap")
    times = {f"{name}_ms": timings.ms(name) for name in names}
    limit = "compute" if compute >= comm else faster
    return {
        "op": "ulysses",
        "direction": direction,
        "ranks": case.transport.size,
        "sequence": args.sequence,
        "batch": args.batch,
        "hidden": args.hidden,
        "heads": args.heads,
        "kv_heads": args.kv_heads,
        "dtype": args.dtype,
        "compute_ms": compute,
        "comm_ms": comm,
        "comm_collective_ms": timings.ms("comm_collective"),
        "comm_p2p_ms": timings.ms("comm_p2p"),
        **times,
        "limit_ms": max(compute, comm),
        "roof_ms": timings.ms(roof),
        "roof_kind": roof.removeprefix("roof_"),
        "overlap_over_limit": timings.ratio("overlap", limit),
        "overlap_over_roof": timings.ratio("overlap", roof),
        "overlap_over_sliced": timings.ratio("overlap", "sliced"),
        "speedup_over_serial": timings.ratio("serial", "overlap"),
        "speedup_of_p2p_alone": timings.ratio("serial", "serial_p2p"),
        "exposed_ms": mine.item(),
        "exposed_over_comm": mine.item() / comm,
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"ulysses {row['direction']:17}{row['ranks']} ranks  {row['gbps'] or 'loopback'} Gbit/s  "
        f"compute {row['compute_ms']:.1f}  comm {row['comm_ms']:.1f}  serial {row['serial_ms']:.1f}  "
        f"p2p serial {row['serial_p2p_ms']:.1f}  sliced {row['sliced_ms']:.1f}  "
        f"attention only {row['attention_only_ms']:.1f}  overlap {row['overlap_ms']:.1f}  "
        f"roof {row['roof_ms']:.1f} ({row['roof_kind']})  limit {row['limit_ms']:.1f} ms  "
        f"overlap/limit {row['overlap_over_limit']:.3f}  exposed {100 * row['exposed_over_comm']:.1f} %",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, "communication : arithmetic")
    parser.add_argument("--sequence", type=int, default=2048, help="rows of all ranks together")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--kv-heads", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--groups", type=int, default=None, help="head groups; chosen by the heads if not given")
    parser.add_argument(
        "--slices", type=int, default=4, help="most head groups of the asynchronous-collective baseline"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
