"""Times query-split attention and its alternatives over links with a limited rate.

    python scripts/bench/attention.py --hosts 2 --ratios 0.5 --positions 2048 --heads 16 --json attention.json
    python scripts/bench/attention.py --hosts 4 --paper --json paper.json

Causal attention, its row-parallel projection and the reduce-scatter under tensor with sequence parallelism. One rank a
host, one thread a rank. Every figure is the median over rounds; each round runs all variants.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Run, Timings, link_parser, rates_for, run_job, write_rows
from linear_cases import LinearCase

from megatron_overlap.comm import Transport, destroy_process_groups, transport_of
from megatron_overlap.ops import LinearPlan, attention_linear_reduce_scatter, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.attention_projection import AttentionRows
from tests.helpers import reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIRECTIONS = ("forward", "forward_backward")
TIMED = ("serial", "serial_p2p", "sliced", "row_parallel", "query_split")


@dataclass(frozen=True)
class PaperRow:
    """A row of the paper's attention table (forward, TP = 4, d = 4096), in ms; None: the paper gives no number."""

    batch: int
    positions: int
    serial: float
    sliced: float
    row_parallel: float | None
    query_split: float

    @property
    def ratio(self) -> float:
        """Communication : compute, if query split hides all of it."""
        return (self.serial - self.query_split) / self.query_split


PAPER = (PaperRow(16, 4096, 270.1, 246.1, 230.9, 215.8), PaperRow(4, 8192, 195.6, 279.7, None, 145.1))
SCALE = 4
"""Sequence and hidden size are both divided by it, which keeps attention : projection; batch and ranks stay."""


@dataclass(frozen=True)
class Shape:
    """Shape of the whole layer; heads are divided over the ranks."""

    positions: int
    batch: int
    heads: int
    kv_heads: int
    head_size: int
    features: int


class _WholeAttention(torch.autograd.Function):
    """Causal attention as one kernel call per direction: the start of every variant except query split."""

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
    """One layer on one rank: data, and all variants of its forward, or of forward and backward.

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
        # Scaled as trained projections: the result has the magnitude of the input.
        self.w = self.w / self.k**0.5
        # Inputs of the parts of backward in variants that run it by itself.
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
            "roof_p2p": roof(lambda: self._messages(False, full, shard), lambda p2p_work: p2p_work.wait_all()),
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
            return self._messages(True, self.dy_full, self.dy).wait_all

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


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    rows: list[dict[str, Any]] = []
    for shape, ratios, published in cases(args):
        for gbps in rates(args, shape, ratios):
            result = run_job(__file__, options(args, shape), args.hosts, gbps, args.timeout)
            for row in result["rows"]:
                row["gbps"] = gbps
                if published is not None:
                    row["paper"] = asdict(published)
                print_row(row)
            rows += result["rows"]
    if args.paper:
        print_paper(rows)
    write_rows(args, rows)


def cases(args: argparse.Namespace) -> list[tuple[Shape, Sequence[float] | None, PaperRow | None]]:
    """Shapes with the ratios of communication to compute that they are run at."""
    if not args.paper:
        kv_heads = args.kv_heads or args.heads
        features = args.features or args.heads * args.head_size
        shape = Shape(args.positions, args.batch, args.heads, kv_heads, args.head_size, features)
        return [(shape, args.ratios, None)]
    hidden = 4096 // SCALE
    heads = hidden // args.head_size
    return [
        (Shape(row.positions // SCALE, row.batch, heads, heads, args.head_size, hidden), [row.ratio], row)
        for row in PAPER
    ]


def options(args: argparse.Namespace, shape: Shape, *extra: str) -> list[str]:
    """The command line of a worker."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(shape).items()]
    words += [f"--{name}={getattr(args, name)}" for name in ("dtype", "pattern", "slices", "rounds", "warmup", "hosts")]
    words += [] if args.chunks is None else [f"--chunks={args.chunks}"]
    return [*words, "--directions", *args.directions, *extra]


def rates(args: argparse.Namespace, shape: Shape, ratios: Sequence[float] | None) -> list[float | None]:
    """Those asked for; for ratios from the compute, which is measured over loopback."""
    if args.loopback or not ratios:
        return [None] if args.loopback else args.gbps
    compute_ms = run_job(__file__, options(args, shape, "--probe"), args.hosts, None, args.timeout)["compute_ms"]
    moved = shape.positions * shape.batch * shape.features * DTYPES[args.dtype].itemsize * (args.hosts - 1) / args.hosts
    return rates_for(moved, compute_ms, ratios)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    plan = LinearPlan(pattern=args.pattern, chunks_per_rank=args.chunks)
    shape = Shape(args.positions, args.batch, args.heads, args.kv_heads, args.head_size, args.features)

    def case(direction: str) -> AttentionCase:
        return AttentionCase(shape, DTYPES[args.dtype], transport, plan, args.slices, direction == "forward_backward")

    if args.probe:
        variants = case("forward").variants()
        result: dict[str, Any] = {"compute_ms": Timings({"compute": variants["compute"]}, args.rounds, 2).ms("compute")}
    else:
        result = {"rows": []}
        for direction in args.directions:
            gate(case(direction))
            result["rows"].append(measure(case(direction), direction, args))
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps(result))
    destroy_process_groups()


def gate(case: AttentionCase) -> None:
    """Check before anything is timed: the result against the plain program, gradients against row parallel."""
    group = dist.group.WORLD
    assert group is not None
    mine, whole = case.query_split(case.plan), case.row_parallel()
    # A sequence at a time: the plain program keeps all scores.
    parts = [
        reference.attention_linear_reduce_scatter(
            *(tensor[:, b : b + 1].float() for tensor in case.qkv), case.w.float(), group=group
        )
        for b in range(case.shape.batch)
    ]
    for name, got, expected in zip(
        ("y", "dq", "dk", "dv", "dw"), mine, [torch.cat(parts, dim=1), *whole[1:]], strict=False
    ):
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        # Probabilities, context, partial sums and result are each rounded to the type of the data.
        if not error < 4 * torch.finfo(case.x.dtype).eps:
            raise SystemExit(f"query split: {name} is off by {error:.2e} of the reference: nothing is timed")


def measure(case: AttentionCase, direction: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one direction."""
    variants = case.variants()
    exposed: dict[str, list[float]] = {"row_parallel": [], "query_split": []}

    def watched(name: str) -> Any:
        run = variants[name]

        def call() -> None:
            before = case.transport.exposed_s
            run()
            exposed[name].append((case.transport.exposed_s - before) * 1e3)

        return call

    timings = Timings({**variants, **{name: watched(name) for name in exposed}}, args.rounds, args.warmup)
    mine = torch.tensor(
        [sorted(values[args.warmup :])[args.rounds // 2] for values in exposed.values()], dtype=torch.float64
    )
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    comm = timings.ms(min(("comm_collective", "comm_p2p"), key=timings.ms))
    roof = min(("roof_collective", "roof_p2p"), key=timings.ms)
    compute = timings.ms("compute")
    return {
        "direction": direction,
        "ranks": case.transport.size,
        **asdict(case.shape),
        "dtype": args.dtype,
        "compute_ms": compute,
        "comm_ms": comm,
        "comm_collective_ms": timings.ms("comm_collective"),
        "comm_p2p_ms": timings.ms("comm_p2p"),
        **{f"{name}_ms": timings.ms(name) for name in TIMED},
        "limit_ms": max(compute, comm),
        "roof_ms": timings.ms(roof),
        "roof_kind": roof.removeprefix("roof_"),
        "query_split_over_roof": timings.ratio("query_split", roof),
        "query_split_over_row_parallel": timings.ratio("query_split", "row_parallel"),
        "query_split_over_sliced": timings.ratio("query_split", "sliced"),
        "speedup_over_serial": timings.ratio("serial", "query_split"),
        "row_parallel_exposed_ms": mine[0].item(),
        "query_split_exposed_ms": mine[1].item(),
        "exposed_over_comm": mine[1].item() / comm,
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {row[f'{name}_ms']:.1f}" for name in ("compute", "comm", *TIMED))
    print(
        f"{row['batch']}x{row['positions']} {row['direction']}, {row['ranks']} ranks  "
        f"{row['gbps'] or 'loopback'} Gbit/s  {times}  "
        f"roof {row['roof_ms']:.1f} ({row['roof_kind']})  limit {row['limit_ms']:.1f} ms  "
        f"query split/roof {row['query_split_over_roof']:.3f}  exposed {100 * row['exposed_over_comm']:.1f} %",
        flush=True,
    )


def print_paper(rows: Sequence[dict[str, Any]]) -> None:
    """Times over the serial time, beside the paper's."""
    print(f"\ntime / serial; sequence and hidden size are 1/{SCALE} of the paper's, batch and ranks the same")
    print(f"{'shape':12}{'direction':18}{'':12}{'sliced':>9}{'row':>9}{'query split':>13}")
    for row in rows:
        paper = row["paper"]
        shape = f"{paper['batch']}x{paper['positions']}"
        here = [row[f"{name}_ms"] / row["serial_ms"] for name in ("sliced", "row_parallel", "query_split")]
        print(f"{shape:12}{row['direction']:18}{'here':12}{here[0]:9.3f}{here[1]:9.3f}{here[2]:13.3f}")
        if row["direction"] == "forward":
            there = [paper[name] for name in ("sliced", "row_parallel", "query_split")]
            text = ["-" if value is None else f"{value / paper['serial']:.3f}" for value in there]
            print(f"{'':30}{'paper':12}{text[0]:>9}{text[1]:>9}{text[2]:>13}")


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, "communication : compute")
    parser.add_argument("--paper", action="store_true", help="the paper's two shapes, scaled, at its ratios")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=16, help="query heads of the layer")
    parser.add_argument("--kv-heads", type=int, help="key heads of the layer; as many as query heads if not given")
    parser.add_argument("--head-size", type=int, default=64)
    parser.add_argument("--features", type=int, help="width of the result; heads x head size if not given")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--pattern", choices=("direct", "ring"), default="direct")
    parser.add_argument("--chunks", type=int, default=None, help="chunks per rank; chosen by the shape if not given")
    parser.add_argument("--slices", type=int, default=4, help="slices of the asynchronous-collective baseline")
    return parser.parse_args()


if __name__ == "__main__":
    main()
