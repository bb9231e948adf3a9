"""Times a data parallel step, with its communication hidden in every way it could be, over links with a real rate.

    python scripts/bench/data_parallel.py --hosts 2 --gbps 1.0 --layers 12 --hidden 768 --tokens 512 --dtype bf16 \\
        --json data_parallel.json

One rank a host, one thread a rank. Every figure is the median over rounds in which all variants run in turn. `sliced`
is what Megatron does with --overlap-grad-reduce and --overlap-param-gather.
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
from data_parallel_variants import DataCase
from harness import Timings, versions

from megatron_overlap.comm import transport_of
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.ranks import run_workers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    rows: list[dict[str, Any]] = []
    rates = [None] if args.loopback else args.gbps
    if args.ratios and not args.loopback:
        rates = rates_for(args)
    for gbps in rates:
        row = launch(args, gbps)
        row["gbps"] = gbps
        print_row(row)
        rows.append(row)
    link = {"hosts": args.hosts, "kind": "loopback" if args.loopback else "netlab", "gbps": rates}
    text = json.dumps({"rows": rows, "link": link, "versions": versions(), "command": sys.argv}, indent=1)
    if args.json:
        Path(args.json).write_text(text + "\n")


def launch(args: argparse.Namespace, gbps: float | None, *more: str) -> dict[str, Any]:
    """One job of all ranks at one rate."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        options = [*sys.argv[1:], *more, "--worker", "--json", str(out)]
        if gbps is None:
            run_workers(__file__, options, args.hosts, timeout_s=args.timeout)
        else:
            with Netlab(args.hosts, gbps) as lab:
                run_workers(__file__, options, args.hosts, lab=lab, timeout_s=args.timeout)
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def moved_bytes(args: argparse.Namespace) -> float:
    """What a rank sends in one step: fp32 gradients, and parameters."""
    elements = args.layers * args.hidden**2 * (args.hosts - 1) / args.hosts
    return elements * (4 + DTYPES[args.dtype].itemsize)


def rates_for(args: argparse.Namespace) -> list[float]:
    """The link rates at which communication takes `ratio` times the computation, measured over loopback."""
    compute_ms = launch(args, None, "--probe")["compute_ms"]
    return [round(moved_bytes(args) * 8 / (ratio * compute_ms * 1e6), 3) for ratio in args.ratios]


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    case = DataCase(args.layers, args.hidden, args.tokens, DTYPES[args.dtype], transport)
    if args.probe:
        row = {"compute_ms": Timings({"compute": case.variants()["compute"]}, args.rounds, 2).ms("compute")}
    else:
        gate(case)
        row = measure(case, args)
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps(row))
    dist.barrier()
    transport.close()
    dist.destroy_process_group()


def gate(case: DataCase) -> None:
    """No time is taken of something that is wrong."""
    steps = 3
    for _ in range(steps):
        case.overlap()
    for layer, (got, expected) in enumerate(zip(case.weights, case.exact(steps), strict=True)):
        # More than two terms are summed in another order; a step moves a parameter by at most the learning rate.
        exact = case.size == 2
        close = torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=1e-2, atol=1e-4)
        if not close:
            off = (got.float() - expected.float()).abs().max()
            raise SystemExit(f"layer {layer}: parameters are off by {off:.2e} of the plain program: nothing is timed")
    case.reset()


def measure(case: DataCase, args: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    variants = case.variants()
    exposed: list[float] = []

    def watched() -> None:
        before = case.transport.exposed_s
        case.overlap()
        exposed.append((case.transport.exposed_s - before) * 1e3)

    timings = Timings({**variants, "overlap": watched}, args.rounds, args.warmup)
    mine = torch.tensor(sorted(exposed[args.warmup :])[args.rounds // 2], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    comm = min(timings.ms("comm_collective"), timings.ms("comm_p2p"))
    roof = min(("roof_collective", "roof_p2p"), key=timings.ms)
    return {
        "ranks": case.size,
        "layers": args.layers,
        "hidden": args.hidden,
        "tokens": args.tokens,
        "dtype": args.dtype,
        "sent_bytes": moved_bytes(args),
        "compute_ms": timings.ms("compute"),
        "comm_ms": comm,
        **{f"{name}_ms": timings.ms(name) for name in variants if name not in ("compute", roof)},
        "limit_ms": max(timings.ms("compute"), comm),
        "roof_ms": timings.ms(roof),
        "roof_kind": roof.removeprefix("roof_"),
        "overlap_over_roof": timings.ratio("overlap", roof),
        "speedup_over_sliced": timings.ratio("sliced", "overlap"),
        "speedup_over_serial": timings.ratio("serial", "overlap"),
        "exposed_ms": mine.item(),
        "exposed_over_comm": mine.item() / comm,
        "rounds": args.rounds,
    }


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['ranks']} ranks  {row['gbps'] or 'loopback'} Gbit/s  compute {row['compute_ms']:.1f}  "
        f"comm {row['comm_ms']:.1f} (collectives {row['comm_collective_ms']:.1f}, p2p {row['comm_p2p_ms']:.1f})  "
        f"serial {row['serial_ms']:.1f}  p2p serial {row['serial_p2p_ms']:.1f}  sliced {row['sliced_ms']:.1f}  "
        f"overlap {row['overlap_ms']:.1f}  roof {row['roof_ms']:.1f} ({row['roof_kind']})  "
        f"limit {row['limit_ms']:.1f} ms  overlap/roof {row['overlap_over_roof']:.3f}  "
        f"sliced/overlap {row['speedup_over_sliced']:.3f}  exposed {100 * row['exposed_over_comm']:.1f} %",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--hosts", type=int, default=2, help="ranks, one a host")
    parser.add_argument("--gbps", type=float, nargs="+", default=[1.0], help="rate of each host's link, Gbit/s")
    parser.add_argument("--ratios", type=float, nargs="+", help="communication : computation; sets the rates")
    parser.add_argument("--loopback", action="store_true", help="no hosts and no rate: a check, not a measurement")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512, help="rows of the activations on each rank")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of parameters; gradients are summed in fp32")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=900, help="seconds for one rate")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
