"""Times balanced attention and its alternatives on the same documents, on nodes with several limited network cards.

    python scripts/bench/varlen.py --json varlen.json --png varlen.png

Four ranks, two nodes: every rank is a host of a netlab with one network card (`--gbps`) and a faster link inside its
node (`--intra-node-gbps`). Each round runs all methods, with one kernel and transport; ratios are made within a round.

The defaults model 64K tokens on 16 GPUs with 4K tokens each. Documents are drawn from published distributions up to 64K
tokens and divided by `--scale`. A rank has about a fifth of the tokens that hide a ring through one card behind
attention, as with 4K tokens on an H200 with a 400 Gbit/s card. The script prints this ratio.

`attention` is attention alone; `layer` adds the projections and a feed-forward block, which rebalancing speeds up.
Output and gradients are checked before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from document_lengths import sample
from harness import Timings, versions
from nodes import NodesLab
from varlen_methods import Batch, Engine, Layer, Messages, Method, limits, methods

from megatron_overlap.comm import destroy_process_groups, transport_of
from megatron_overlap.ops.flash_attention import Attended, documents_forward
from megatron_overlap.ops.varlen.pass_kv_pass_q import Shape
from megatron_overlap.schedules.varlen import CostModel, Topology
from megatron_overlap.tools.launch.processes import run_workers

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MIXES = ("prolong", "prolong64k", "arxiv", "github", "wlb")
BATCHES = ("long", "short", *MIXES)
BASELINES = ("ring", "all_gather", "ulysses", "hybrid", "packing")
PARTS = ("partition", "engine", "routing", "remap")
NODES, DEVICES = 2, 2
_REPEATS = 10
CRITERIA = {("long", "ring round"): 1.7, ("short", "ring"): 4.0}
CRITERIA_MIXED = {"ring": 2.8, "all_gather": 1.3, "hybrid": 1.2}


def main() -> None:
    args = parse()
    if args.worker:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        options = [*sys.argv[1:], "--worker", "--json", str(out)]
        if args.loopback:
            run_workers(__file__, options, NODES * DEVICES, timeout_s=args.timeout)
        else:
            with NodesLab(NODES * DEVICES, args.gbps, DEVICES, args.intra_node_gbps) as lab:
                run_workers(__file__, options, NODES * DEVICES, lab=lab, timeout_s=args.timeout)
        result: dict[str, Any] = json.loads(out.read_text())
    for row in result["rows"]:
        print_row(row)
    print(
        f"a rank has {result['cost']['share_of_it']:.2f} of the tokens from which on a ring through one card is hidden"
    )
    result["summary"] = summary(result["rows"])
    for line in result["summary"]:
        print(
            f"{line['batch']}, {line['direction']}: {line['ratio']:.2f} x {line['over']}, criterion {line['criterion']}"
        )
    link = {
        "kind": "loopback" if args.loopback else "netlab",
        "gbps": args.gbps,
        "intra_node_gbps": args.intra_node_gbps,
    }
    result |= {"link": link, "versions": versions(), "command": sys.argv}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    if args.png:
        from plot_varlen import draw

        draw(result, Path(args.png))


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ratios of the acceptance criteria for attention alone; the geometric mean over the mixed batches."""
    found = []
    for direction in sorted({row["direction"] for row in rows}):
        mine = [row for row in rows if row["direction"] == direction and row["scope"] == "attention"]
        for (batch, over), criterion in CRITERIA.items():
            for row in mine:
                if row["batch"] == batch:
                    ratio = row["ring_round_over_routed"] if over == "ring round" else row["gain_over"][over]
                    found.append(_line(batch, direction, over, ratio, criterion))
        mixed = [row["gain_over"] for row in mine if row["batch"] in MIXES]
        for over, criterion in CRITERIA_MIXED.items():
            if mixed:
                found.append(_line("mixed", direction, over, geometric_mean(gain[over] for gain in mixed), criterion))
    return found


def _line(batch: str, direction: str, over: str, ratio: float, criterion: float) -> dict[str, Any]:
    return {"batch": batch, "direction": direction, "over": over, "ratio": ratio, "criterion": criterion}


def print_row(row: dict[str, Any]) -> None:
    times = "  ".join(f"{name} {ms:.1f}" for name, ms in row["ms"].items())
    print(f"{row['batch']} ({row['documents']} documents) {row['scope']} {row['direction']}: {times} ms", flush=True)


def work(args: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = transport_of(dist.group.WORLD)
    shape = Shape(args.heads, args.kv_heads, args.size, DTYPES[args.dtype])
    cost = calibrate(shape)
    inside, between = args.intra_node_gbps / 8, args.gbps / 8
    latencies = {"intra_latency_us": args.inside_latency_us, "inter_latency_us": args.latency_us}
    topology = Topology(NODES, DEVICES, DEVICES, intra_gbps=inside, inter_gbps=between, **latencies)
    rows = []
    seeded = [(name, seed) for name in args.batches for seed in (args.seeds if name in MIXES else args.seeds[:1])]
    for name, seed in seeded:
        lengths = lengths_of(name, args.tokens, args.scale, seed)
        batch = Batch.random(lengths, shape)
        found = methods(lengths, topology, cost, shape, transport)
        gate(found, batch, args.direction)
        for scope in args.scopes:
            for direction in args.direction:
                backward = direction == "forward_backward"
                row = measure(found, batch, shape, topology, backward=backward, linear=scope == "layer", args=args)
                rows.append(
                    {
                        "batch": name,
                        "seed": seed,
                        "documents": len(lengths),
                        "direction": direction,
                        "scope": scope,
                        **row,
                    }
                )
    # Tokens of a rank with which the messages of a ring through one card take as long as its attention.
    hidden = round(2 * shape.kv_heads / shape.heads * flops_per_s(cost, shape) / (args.gbps * 1e9 / 8))
    share = args.tokens / (NODES * DEVICES) / hidden
    known = {"hidden_from_tokens": hidden, "share_of_it": share, **asdict(cost)}
    if transport.rank == 0:
        Path(args.json).write_text(json.dumps({"rows": rows, "cost": known, "options": vars(args)}))
    destroy_process_groups()


def lengths_of(name: str, tokens: int, scale: int, seed: int) -> list[int]:
    """`long`: one document; `short`: those of ProLong below 2K tokens; else a published distribution; scaled."""
    if name == "long":
        return [tokens]
    if name == "short":
        drawn = [length for length in sample("prolong", 64 * tokens * scale, seed) if length < 2048]
    else:
        drawn = sample(name, 2 * tokens * scale, seed)
    lengths: list[int] = []
    left = tokens
    for length in drawn:
        lengths.append(min(left, -(-length // scale)))
        left -= lengths[-1]
        if not left:
            return lengths
    raise ValueError(f"tokens: {tokens}: {name} drew too few")


def calibrate(shape: Shape) -> CostModel:
    """The planner's cost model of this machine with all ranks busy: the same on every rank."""

    def took_fs(lengths: list[int]) -> float:
        q = torch.randn(sum(lengths), shape.heads, shape.size).to(shape.dtype)
        k = torch.randn(sum(lengths), shape.kv_heads, shape.size).to(shape.dtype)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        times = []
        for _ in range(3):
            dist.barrier()
            start = perf_counter()
            for _ in range(_REPEATS):  # longer than one turn of ranks that share a core
                documents_forward(Attended(q, k, k, out, lse), lengths, 1.0)
            times.append(perf_counter() - start)
        return median(times) * 1e15 / _REPEATS

    times = torch.tensor([took_fs([1024]), took_fs([64] * 16), took_fs([1] * 64) / 64], dtype=torch.float64)
    dist.all_reduce(times)
    whole, parts, one = (times / dist.get_world_size()).tolist()
    pairs, short_pairs = 1024 * 1025 // 2, 16 * 64 * 65 // 2
    pair = max(1.0, (whole - parts) / (pairs - short_pairs))
    token = max(0.0, (parts - short_pairs * pair) / 1024)
    kv_bytes = 2 * shape.kv_heads * shape.size * shape.dtype.itemsize
    linear = int(12 * (shape.heads * shape.size) ** 2 * 2 / 80e9 * 1e15)
    return CostModel(round(pair), round(token), round(one), linear, kv_bytes)


def flops_per_s(cost: CostModel, shape: Shape) -> float:
    return 4 * shape.heads * shape.size / (cost.pair_fs * 1e-15)


def gate(found: dict[str, Method], batch: Batch, directions: Sequence[str]) -> None:
    """No time is taken of something that is wrong."""
    exact = batch.exact()
    for name, method in found.items():
        layer = Layer(method, batch, backward="forward_backward" in directions)
        for rows, results in zip(layer.rows, layer.run(), strict=True):
            for what, got, true in zip(("y", "dq", "dk", "dv"), results, exact, strict=False):
                off = (got.float() - true[rows]).norm() / true.norm()
                if not off < 4 * torch.finfo(got.dtype).eps:
                    raise SystemExit(f"{name}: {what} is off by {off:.2e} of the reference: nothing is timed")


def measure(
    found: dict[str, Method],
    batch: Batch,
    shape: Shape,
    topology: Topology,
    *,
    backward: bool,
    linear: bool,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """All methods on one batch."""
    layers = {name: Layer(method, batch, backward=backward, linear=linear) for name, method in found.items()}
    runs = {name: layer.run for name, layer in layers.items()}
    ours, ring, routed = found["routing"], found["ring"], found["ring_routed"]
    assert isinstance(ours, Engine)
    assert isinstance(ring, Engine)
    assert isinstance(routed, Engine)
    if not linear:
        del runs["remap"]  # costs here, and gains nothing: it is for linear layers
        transport = transport_of(dist.group.WORLD)
        runs |= limits(ours, batch, shape, transport, backward=backward)
        direct, over_all_nics = (Messages(each.plan, shape, transport) for each in (ring, routed))
        runs["ring_round"] = lambda: direct.run(backward=backward)
        runs["ring_round_routed"] = lambda: over_all_nics.run(backward=backward)
    timings = Timings(runs, args.rounds, args.warmup)
    best = "remap" if linear else "routing"
    others = [name for name in (*BASELINES, *PARTS) if name in runs and name != best]
    row: dict[str, Any] = {
        "ms": {name: timings.ms(name) for name in runs},
        "ours": best,
        "gain_over": {name: timings.ratio(name, best) for name in others},
        "parts_over_ring": {name: timings.ratio("ring", name) for name in PARTS if name in runs},
        "rounds": args.rounds,
        "tokens": sum(batch.lengths),
        "lengths": sorted(batch.lengths, reverse=True)[:32],
    }
    if not linear:
        row["ring_round_over_routed"] = timings.ratio("ring_round", "ring_round_routed")
        row["over_roof"] = timings.ratio("routing", "roof")
    return row


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gbps", type=float, default=0.15, help="rate of each rank's card, Gbit/s")
    parser.add_argument("--intra-node-gbps", type=float, default=1.125, help="rate of each rank's link inside its node")
    parser.add_argument("--latency-us", type=float, default=400.0, help="of a message between nodes, for the planner")
    parser.add_argument("--inside-latency-us", type=float, default=250.0, help="the same, inside a node")
    parser.add_argument("--loopback", action="store_true", help="no limited links: a check, not a measurement")
    parser.add_argument("--batches", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--scopes", nargs="+", choices=("attention", "layer"), default=["attention", "layer"])
    directions = ("forward", "forward_backward")
    parser.add_argument("--direction", nargs="+", choices=directions, default=list(directions))
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--scale", type=int, default=32, help="published lengths are divided by it")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of the mixed batches, one each")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=3600, help="seconds in all")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--png", help="file for the picture")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
