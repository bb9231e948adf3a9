"""Times an overlapped tensor-parallel linear and its alternatives over links with a limited rate.

    python scripts/bench/linear.py --hosts 2 --gbps 1.0 --rows 2048 --in-features 2048 --out-features 4096 \\
        --dtype bf16 --json linear.json

One rank a host, one thread a rank. Every figure is the median over rounds; each round runs all variants.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Timings, link_parser, rates_for, run_job, run_rates
from linear_cases import ALL_REDUCE_OPS, AllReduceCase, LinearCase

from megatron_overlap.comm import destroy_process_groups, transport_of
from megatron_overlap.ops import LinearPlan, reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
OPS = ("ag_gemm", "gemm_rs", *ALL_REDUCE_OPS)
DIRECTIONS = ("forward", "forward_backward")

Case = LinearCase | AllReduceCase


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    run_rates(__file__, args, rates(args), print_row)


def rates(args: argparse.Namespace) -> list[float | None]:
    """Those asked for; for `--ratios` from a GEMM measured over loopback."""
    if args.loopback or not args.ratios:
        return [None] if args.loopback else args.gbps
    gemm_ms = run_job(__file__, [*sys.argv[1:], "--probe"], args.hosts, None, args.timeout)["gemm_ms"]
    features = args.out_features if args.ops == ["gemm_ar"] else args.in_features
    passes = 2 if set(args.ops) <= set(ALL_REDUCE_OPS) else 1
    moved = passes * args.rows * features * DTYPES[args.dtype].itemsize * (args.hosts - 1) / args.hosts
    return rates_for(moved, gemm_ms, args.ratios)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    size = transport.size
    plan = LinearPlan(pattern=args.pattern, chunks_per_rank=args.chunks)
    rows: list[dict[str, Any]] = []

    def case(op: str, direction: str) -> Case:
        shape = (args.rows, args.in_features, args.out_features)
        backward = direction == "forward_backward"
        make = AllReduceCase if op in ALL_REDUCE_OPS else LinearCase
        return make(op, *shape, DTYPES[args.dtype], transport, plan, args.slices, backward)

    if args.probe:
        gemm_ms = Timings({"gemm": case("ag_gemm", "forward").variants()["gemm"]}, args.rounds, 2).ms("gemm")
        rows_out: dict[str, Any] = {"gemm_ms": gemm_ms}
    else:
        for op in args.ops:
            # A column-parallel layer without sequence parallelism communicates in backward only.
            directions = [way for way in args.directions if op != "copy_gemm" or way == "forward_backward"]
            gate(case(op, "forward_backward" if op == "copy_gemm" else "forward"))
            for direction in directions:
                rows.append(measure(case(op, direction), op, direction, args))
        rows_out = {"rows": rows}
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps(rows_out))
    destroy_process_groups()
    assert size == args.hosts


def gate(case: Case) -> None:
    """Check the result before anything is timed."""
    group = dist.group.WORLD
    assert group is not None
    x, w = case.x.float().requires_grad_(), case.w.float()
    ops = {
        "ag_gemm": reference.all_gather_linear,
        "gemm_rs": reference.linear_reduce_scatter,
        "gemm_ar": reference.linear_all_reduce,
        "copy_gemm": reference.copy_linear,
    }
    expected = ops[case.op](x, w, group=group)
    if case.op == "copy_gemm":
        expected.backward(case.dy.float())
        assert x.grad is not None
        expected = x.grad
    got = case.run(case.plan)
    error = (got.float() - expected).norm() / expected.norm()
    if not error < 2 * torch.finfo(case.x.dtype).eps:
        raise SystemExit(f"{case.op}: the overlapped result is off by {error:.2e} of the reference: nothing is timed")


def measure(case: Case, op: str, direction: str, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one op in one direction."""
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
    gemm, comm = timings.ms("gemm"), timings.ms(faster)
    times = {f"{name}_ms": timings.ms(name) for name in ("serial", "serial_p2p", "sliced", "overlap")}
    ect = times["overlap_ms"] - gemm
    return {
        "op": op,
        "direction": direction,
        "ranks": case.transport.size,
        "rows": args.rows,
        "in_features": args.in_features,
        "out_features": args.out_features,
        "dtype": args.dtype,
        "gemm_ms": gemm,
        "comm_ms": comm,
        "comm_collective_ms": timings.ms("comm_collective"),
        "comm_p2p_ms": timings.ms("comm_p2p"),
        **times,
        "limit_ms": max(gemm, comm),
        "roof_ms": timings.ms(roof),
        "roof_kind": roof.removeprefix("roof_"),
        "overlap_over_roof": timings.ratio("overlap", roof),
        "overlap_over_sliced": timings.ratio("overlap", "sliced"),
        "speedup_over_serial": timings.ratio("serial", "overlap"),
        "speedup_of_p2p_alone": timings.ratio("serial", "serial_p2p"),
        "ect_ms": ect,
        "overlap_efficiency": 1 - ect / (times["serial_ms"] - gemm) if times["serial_ms"] > gemm else None,
        "exposed_ms": mine.item(),
        "exposed_over_comm": mine.item() / comm,
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['op']:10}{row['direction']:17}{row['ranks']} ranks  {row['gbps'] or 'loopback'} Gbit/s  "
        f"gemm {row['gemm_ms']:.1f}  comm {row['comm_ms']:.1f}  serial {row['serial_ms']:.1f}  "
        f"p2p serial {row['serial_p2p_ms']:.1f}  sliced {row['sliced_ms']:.1f}  overlap {row['overlap_ms']:.1f}  "
        f"roof {row['roof_ms']:.1f} ({row['roof_kind']})  limit {row['limit_ms']:.1f} ms  "
        f"overlap/roof {row['overlap_over_roof']:.3f}  exposed {100 * row['exposed_over_comm']:.1f} %",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = link_parser(__doc__, "communication : GEMM")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--in-features", type=int, default=2048)
    parser.add_argument("--out-features", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["ag_gemm", "gemm_rs"])
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--pattern", choices=("direct", "ring"), help="chosen by the device if not given")
    parser.add_argument("--chunks", type=int, default=None, help="chunks per rank; chosen by the rows if not given")
    parser.add_argument("--slices", type=int, default=4, help="slices of the asynchronous-collective baseline")
    return parser.parse_args()


if __name__ == "__main__":
    main()
