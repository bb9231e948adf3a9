"""Benchmark of one node with several GPUs: the linear layers of LLaMA-3 by every method that the node can run.

    torchrun --nproc-per-node 8 scripts/gpu/node.py --json node.json --plot node.png      less than 15 minutes
    torchrun --nproc-per-node 2 scripts/gpu/node.py --dry-run                             tiny shapes on the CPU, gloo
    torchrun --nproc-per-node 2 scripts/gpu/node.py --share-gpu                           all ranks on one GPU

First each method is compared with the plain program (all-gather, then GEMM; GEMM, then reduce-scatter), forward and
backward, within a derived bound. A method that is wrong, fails or hangs is reported and not timed, and the exit code is
1. A method that the node cannot run is reported with the reason.

Then the methods are timed in turn at each shape, by the slowest rank, beside the GEMMs and the collectives alone. All
return the weight gradient in bf16.
- `roof_ms`: the larger of the GEMMs alone and the collectives alone. `together_ms`: both, started together.
- `ideal_ms`, of a forward: one of N slices of the GEMM, and the larger of its other slices and the collective.
- `ect_ms`: time beyond the GEMMs alone, which is the exposed time and Flux's effective communication time.
- `eta`: hidden time as a share of the smaller of GEMM and communication. `overlap_efficiency`: 1 - ECT / communication.
- `host_us`: time in which the host enqueues. `sms`: largest number of blocks of a kernel that only communicates.

Every part is a process of each rank with a deadline. The JSON file is written after every part.
CUDA_DEVICE_MAX_CONNECTIONS is the caller's, and is recorded. Not yet run on several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from one_node.methods import METHODS  # noqa: E402
from one_node.parts import DRY, GATE, PASSES, SMS, TIMED, layers, run_part  # noqa: E402
from part_process import ENDED, INTERRUPTED, SHARED_GPU_ENV, device_text, is_bad, run_process, save, triton_cache  # noqa: E402

from megatron_overlap.comm.host_group import store_beside  # noqa: E402
from megatron_overlap.tools.launch.processes import free_port, loopback_env  # noqa: E402

BUDGET_S = 870.0
SECONDS = {GATE: 300.0, **dict.fromkeys([*TIMED, DRY], 110.0), SMS: 60.0}
"""Of each part. What one part leaves over goes to the parts behind it."""
GRACE_S = 10.0
DRY_NOTE = "a dry run on the CPU: the times have no meaning"
SHARED_NOTE = "all ranks share one GPU: the times have no meaning"
Row = dict[str, Any]


class Ranks:
    """Runs parts on all ranks of the node."""

    def __init__(self, options: argparse.Namespace) -> None:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        self._options, self._store = options, store_beside(dist.group.WORLD)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._number, self.interrupted = 0, False

    def run(self, plan: Row | None) -> Row | None:
        """Run `plan` of rank 0, which ends the other ranks with None. Returns how it ended; on rank 0 also its rows."""
        plans = [plan and plan | {"port": free_port()}]
        dist.broadcast_object_list(plans)
        if plans[0] is None:
            return None
        plan, options = plans[0], self._options
        # Only rank 0 of torchrun's own job serves its store.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TORCHELASTIC_")}
        environment = {**inherited, **loopback_env(), "MASTER_PORT": str(plan["port"])}
        environment |= {**triton_cache(), "PYTHONUNBUFFERED": "1", "CUDA_MODULE_LOADING": "EAGER"}
        command = [sys.executable, __file__, "--part", plan["part"], "--until", str(time.time() + plan["seconds"])]
        command += ["--methods", ",".join(plan["methods"]), "--skip", str(plan["skip"])]
        if options.break_method:
            command += ["--break", options.break_method]
        if options.dry_run:
            command, environment = [*command, "--dry-run"], environment | {"TRITON_INTERPRET": "1"}
        if options.share_gpu:
            environment |= {**SHARED_GPU_ENV, "LOCAL_RANK": "0"}
        self._number += 1
        key = f"stop/{self._number}"
        stopped = "stopped: the process of another rank has ended"
        found = run_process(
            command, environment, plan["seconds"] + GRACE_S, lambda: stopped if self._store.check([key]) else ""
        )
        found["rows"] = [row for row in found["rows"] if "finished" not in row]
        if found["how"] == INTERRUPTED:
            self.interrupted = True
            return found
        if found["how"] != ENDED:
            self._store.set(key, "")
        ends: list[Any] = [None] * self.size
        dist.all_gather_object(ends, (found["how"], found.get("stderr", "")))
        for rank, (how, stderr) in enumerate(ends):
            if how not in (ENDED, stopped):
                found |= {"how": f"rank {rank} {how}" if rank else how, "stderr": stderr}
        return found


def measure(ranks: Ranks, part: str, methods: list[str], end: float) -> Row:
    """Run a part until `end`. After a method that fails or hangs, it starts again without the method."""
    rows: list[Row] = []
    start, skip = time.perf_counter(), 0
    found: Row = {}
    while True:
        left = end - time.perf_counter()
        if left < 5:
            found = {"rows": [], "how": "no time left"}
        else:
            # A part that hangs leaves time for another attempt.
            seconds = left / 2 if part == GATE else left
            found = ranks.run({"part": part, "methods": methods, "skip": skip, "seconds": seconds}) or {}
        begun = [row for row in found["rows"] if "begin" in row]
        rows += [row for row in found["rows"] if "begin" not in row]
        if found["how"] in (ENDED, INTERRUPTED) or not begun:
            break
        last = begun[-1]
        # A process that has ended in no method has ended in the timing of a shape: the next one.
        skip = last.pop("begin") + ("method" not in last)
        rows.append({**last, "failed": found["how"], "stderr": found.get("stderr", "")})
        methods = [method for method in methods if method != last.get("method")]
        if skip == len(methods if part in (GATE, SMS) else layers(part, ranks.size)) or not methods:
            break
    return found | {"rows": rows, "wrong_rows": sum(map(is_bad, rows)), "seconds": time.perf_counter() - start}


def verdicts(figures: Row, methods: Sequence[str]) -> dict[str, str]:
    """For each method why it was not, or will not be, timed; empty if it may be."""
    found = dict.fromkeys(methods, "not compared with the plain program")
    # The profile comes after the times.
    rows = [row for row in rows_of({**figures, SMS: None}) if row.get("method") in found]
    for row in rows:
        if row.get("right"):
            found[row["method"]] = ""
    for row in rows:
        if row.get("shape", GATE) == GATE and not row.get("right", True):
            found[row["method"]] = f"wrong: errors as shares of their bounds are {row['shares']}"
        elif reason := row.get("failed") or row.get("left_out"):
            found[row["method"]] = reason
    return found


def rows_of(figures: Row) -> list[Row]:
    """The rows of all parts."""
    parts = [value for value in figures.values() if isinstance(value, dict) and "rows" in value]
    return [row for part in parts for row in part["rows"]]


def timings(figures: Row) -> list[Row]:
    """The rows with times."""
    return [row for row in rows_of(figures) if "ms" in row or "roof_ms" in row]


def table(figures: Row) -> str:
    """The figures of each shape and pass, and why methods have none."""
    counted = [row for row in figures.get(SMS, {}).get("rows", []) if "sms" in row]
    sms = {(row["method"], row["op"], row["pass"]): row["sms"] for row in counted}
    lines = [figures["what"]] if "what" in figures else []
    for row in timings(figures):
        if "method" not in row:
            bounds = ", ".join(f"{name[:-3]} {value:.3f}" for name, value in row.items() if name.endswith("_ms"))
            lines.append(f"{row['shape']}, {row['pass']}, ms: {bounds}")
            continue
        blocks = sms.get((row["method"], row["op"], row["pass"]), "unknown")
        lines.append(
            f"  {row['method']:13} {row['ms']:8.3f} ms   exposed {row['ect_ms']:7.3f} ms   eta {row['eta']:6.2f}   "
            f"efficiency {row['overlap_efficiency']:6.2f}   host {row['host_us']:6.0f} us   SMs {blocks}"
        )
    lines += [f"wrong: {json.dumps(row)}" for row in rows_of(figures) if not row.get("right", True)]
    lines += [f"not timed: {method}: {reason}" for method, reason in figures.get("methods", {}).items() if reason]
    return "\n".join(lines)


def plot(figures: Row, path: Path) -> None:
    """Time of each method by shape as bars, the roof as a line; a panel for each pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = timings(figures)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows if "method" in row))
    figure, panels = plt.subplots(len(PASSES), 1, figsize=(max(7.0, 1.2 * len(shapes)), 8))
    for name, axes in zip(PASSES, panels, strict=True):
        for number, method in enumerate(methods):
            mine = [row for row in rows if row.get("method") == method and row["pass"] == name]
            places = [shapes.index(row["shape"]) + (number + 0.5) * 0.8 / len(methods) - 0.4 for row in mine]
            axes.bar(places, [row["ms"] for row in mine], 0.8 / len(methods), label=method)
        for row in rows:
            if "roof_ms" in row and row["pass"] == name:
                place = shapes.index(row["shape"])
                axes.hlines(row["roof_ms"], place - 0.45, place + 0.45, colors="black")
        axes.set_xticks(range(len(shapes)), shapes, rotation=30, ha="right", fontsize=7)
        axes.set(ylabel="ms", title=f"{name}; the line is the larger of GEMM and communication alone")
    panels[0].legend(fontsize=7)
    figure.suptitle(figures.get("what", ""))
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def machine(options: argparse.Namespace, ranks: int) -> Row:
    """Versions and devices."""
    found: Row = {"ranks": ranks, "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("megatron-overlap", "triton", "transformer-engine"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["max_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if options.dry_run:
        return found | {"dry_run": True, "what": DRY_NOTE}
    if options.share_gpu:
        found["what"] = SHARED_NOTE
    return found | {"nccl": torch.cuda.nccl.version(), "device": device_text()}


def rank_zero(ranks: Ranks, options: argparse.Namespace) -> int:
    """Run all parts, and write the figures after each."""
    end = time.perf_counter() + options.budget
    figures = {**machine(options, ranks.size), "arguments": sys.argv[1:]}
    figures["started"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    parts = [GATE, *([DRY] if options.dry_run else TIMED), SMS]
    try:
        for number, part in enumerate(parts):
            weights = [SECONDS[each] for each in parts[number:]]
            seconds = (end - time.perf_counter() - GRACE_S) * weights[0] / sum(weights)
            why = verdicts(figures, options.methods)
            methods = [method for method in options.methods if part == GATE or not why[method]]
            if reason := skipped_reason(DRY if options.dry_run else part, ranks.size, methods):
                found: Row = {"rows": [{"left_out": reason}], "how": ENDED, "wrong_rows": 0, "seconds": 0.0}
            else:
                found = measure(ranks, part, methods, time.perf_counter() + seconds)
            figures |= {part: found, "methods": verdicts(figures | {part: found}, options.methods)}
            save(options.json, figures)
            counts = f"{len(found['rows'])} rows, {found['wrong_rows']} wrong, {found['seconds']:.0f} s"
            notable = [row for row in found["rows"] if is_bad(row) or "left_out" in row]
            print(f"{part}: {counts}, {found['how']}", *map(json.dumps, notable), sep="\n", flush=True)
            print(found.get("stderr", ""), end="", file=sys.stderr)
            if found["how"] == INTERRUPTED:
                break
    finally:
        figures["seconds"] = options.budget - (end - time.perf_counter())
        save(options.json, figures)
        print(table(figures), flush=True)
    if options.plot:
        try:
            plot(figures, options.plot)
        except (ImportError, KeyError, ValueError) as error:
            print(f"no plot: {error}", file=sys.stderr)
    # A part that an interrupt left out has no entry.
    ends = {part: figures.get(part, {"how": "left out"}) for part in parts}
    bad = [part for part, found in ends.items() if found.get("wrong_rows") or found["how"] != ENDED]
    if bad:
        print(f"failed parts: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


def skipped_reason(part: str, ranks: int, methods: Sequence[str]) -> str:
    """Why a part has nothing to do; empty if it has."""
    try:
        if part not in (GATE, DRY):
            layers(part, ranks)
    except ValueError as error:
        return str(error)
    return "" if methods else "no method has passed the comparison"


def unsupported_reason(options: argparse.Namespace) -> str:
    """Why nothing can run here; empty if something can."""
    if "LOCAL_WORLD_SIZE" not in os.environ:
        return "start it with torchrun --nproc-per-node N, with one rank for each GPU"
    size, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if size != local or size < 2:
        return f"{size} ranks, {local} of them on this node: it needs one node and at least two ranks"
    if not options.dry_run and torch.cuda.device_count() < (1 if options.share_gpu else local):
        found = f"{torch.cuda.device_count()} CUDA devices for {local} ranks"
        return f"{found}: it needs one for each rank; with one, try --share-gpu; without GPUs, try --dry-run"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file of the figures, written after every part")
    parser.add_argument("--plot", type=Path, help="file of a bar chart")
    parser.add_argument("--methods", type=lambda text: text.split(","), help="separated by commas; default: all")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--dry-run", action="store_true", help="gloo and the CPU; the times have no meaning")
    parser.add_argument("--share-gpu", action="store_true", help=f"{SHARED_NOTE}; NCCL 2.30.3; not fused")
    parser.add_argument(
        "--break", dest="break_method", choices=METHODS, help="make this method wrong, to see that it is noticed"
    )
    for name, kind in {"part": str, "until": float, "skip": int}.items():
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.methods is None:
        # A fused kernel may hold all SMs while it waits for a copy, which on one device needs some.
        options.methods = [name for name in METHODS if not (options.share_gpu and name.startswith("fused"))]
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(unknown))}: must be of {', '.join(METHODS)}")
    if options.part:
        try:
            return run_part(options)
        except Exception:
            traceback.print_exc()
            return 1
    if reason := unsupported_reason(options):
        if os.environ.get("RANK", "0") == "0":
            print(reason, file=sys.stderr)
        return 2
    ranks = Ranks(options)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    code = 0
    if ranks.rank == 0:
        code = rank_zero(ranks, options)
        if not ranks.interrupted:
            ranks.run(None)
    else:
        while not ranks.interrupted and ranks.run(None) is not None:
            pass
    if not ranks.interrupted:
        dist.barrier()
    return code


if __name__ == "__main__":
    exit_code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A shutdown of NCCL or of symmetric memory can wait for a rank that has ended, and threads of gloo can abort one.
    os._exit(exit_code)
