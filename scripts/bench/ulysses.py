"""Times an attention layer under Ulysses against everything it could be compared with, over links with a real rate.

    python scripts/bench/ulysses.py --hosts 2 --gbps 1.0 --sequence 2048 --hidden 1024 --heads 16 --dtype bf16 \\
        --json ulysses.json

One rank a host, one thread a rank. Every figure is the median over rounds in which all variants run in turn. `compute`
is all the arithmetic of the layer and nothing else, `comm` the faster of torch's all-to-alls and bare messages, `limit`
the larger of both; `serial` is stock's order, in which nothing of the all-to-alls is hidden.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Timings, versions
from ulysses_variants import Shape, UlyssesCase

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import UlyssesPlan, reference
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.ranks import run_workers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
DIRECTIONS = ("forward", "forward_backward")


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    rows: list[dict[str, Any]] = []
    link: dict[str, Any] = {"hosts": args.hosts, "kind": "netlab" if not args.loopback else "loopback"}
    rates = [None] if args.loopback else args.gbps
    if args.ratios and not args.loopback:
        rates = rates_for(args)
    for gbps in rates:
        result = launch(args, gbps)
        for row in result["rows"]:
            row["gbps"] = gbps
            print_row(row)
        rows += result["rows"]
        link["gbps"] = gbps if len(rates) == 1 else rates
    text = json.dumps({"rows": rows, "link": link, "versions": versions(), "command": sys.argv}, indent=1)
    if args.json:
        Path(args.json).write_text(text + "\n")


def launch(args: argparse.Namespace, gbps: float | None) -> dict[str, Any]:
    """One job of all ranks at one rate."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = [*sys.argv[1:], "--worker", "--json", str(out)]
        if gbps is None:
            run_workers(__file__, options, args.hosts, timeout_s=args.timeout)
        else:
            with Netlab(args.hosts, gbps) as lab:
                run_workers(__file__, options, args.hosts, lab=lab, timeout_s=args.timeout)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def rates_for(args: argparse.Namespace) -> list[float]:
    """The link rates at which communication takes `ratio` times the arithmetic of a forward, measured over loopback."""
    probe = argparse.Namespace(**{**vars(args), "ratios": None})
    saved, sys.argv = sys.argv, [*sys.argv, "--probe"]
    compute_ms = launch(probe, None)["compute_ms"]
    sys.argv = saved
    heads = 2 * args.heads + 2 * args.kv_heads
    elements = args.sequence * args.batch * heads * args.hidden // args.heads
    moved = elements / args.hosts * DTYPES[args.dtype].itemsize * (args.hosts - 1) / args.hosts
    return [round(moved * 8 / (ratio * compute_ms * 1e6), 3) for ratio in args.ratios]


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
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def gate(case: UlyssesCase) -> None:
    """No time is taken of something that is wrong."""
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=2, help="ranks, one a host")
    parser.add_argument("--gbps", type=float, nargs="+", default=[1.0], help="rate of each host's link, Gbit/s")
    parser.add_argument("--ratios", type=float, nargs="+", help="communication : arithmetic; sets the rates")
    parser.add_argument("--loopback", action="store_true", help="no hosts and no rate: a check, not a measurement")
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
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one rate")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
