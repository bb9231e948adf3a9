"""Checks and times copies and fused kernels on one GPU: results, GEMM rates, and the hidden share of link time.

    python scripts/gpu/first_contact.py --json first_contact.json       less than 10 minutes, needs only torch
    python scripts/gpu/first_contact.py --only gemm --json out.json   one part
    python scripts/gpu/first_contact.py --dry-run                     every line of it in the interpreter, no GPU

Each part is a process of its own with a deadline. The JSON file is written after every part, also after a compiler
error, a failed allocation, a wrong address or a deadlock.

Ranks are virtual: R streams of one process, each with a part of the SMs, so that all blocks that wait are resident.
Links: `P`, peers' shards in pinned host memory over PCIe, a real link off the SMs; `D`, device copies that the host
paces by a word that the copy stream waits for, at 200 and 450 GB/s. Of a reduce-scatter, the inbound half and the sum
are timed. One GPU stands for one rank here: no figure of this script is one of several GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from part_process import BAD_ROWS, ENDED, INTERRUPTED, device_text, is_bad, run_process, save, triton_cache  # noqa: E402

BUDGET_S = 580.0
SECONDS = {
    "physics": 30.0,
    "queues 1": 15.0,
    "queues 8": 15.0,
    "correct": 50.0,
    "copies": 60.0,
    "graphs": 30.0,
    "processes": 60.0,
    "link 1": 100.0,
    "link 8": 40.0,
    "gemm": 40.0,
    "split": 15.0,
    "overlap": 50.0,
    "hopper": 60.0,
    "stress": 30.0,
}
"""Of each part, in the order of the run; what one leaves over goes to those behind it. A number is that of hardware
queues (CUDA_DEVICE_MAX_CONNECTIONS)."""
GRACE_S = 10.0


def run_part(name: str, dry: bool, seconds: float) -> int:
    """This process is one part: a JSON line for each row, at once."""
    from one_gpu.hopper import hopper
    from one_gpu.link import link
    from one_gpu.parts import PARTS
    from one_gpu.physics import physics, queues
    from one_gpu.processes import copies, graphs, processes

    others = {each.__name__: each for each in (physics, queues, copies, graphs, processes, hopper, link)}
    part = {**PARTS, **others}[name.split()[0]]
    wrong = False
    for row in part(dry, time.perf_counter() + seconds):
        print(json.dumps(row), flush=True)
        wrong |= is_bad(row)
    return BAD_ROWS if wrong else 0


def measure(name: str, dry: bool, seconds: float) -> dict[str, Any]:
    """Runs a part in a process of its own; its rows and how it ended."""
    environment = {**os.environ, **triton_cache(), "CUDA_MODULE_LOADING": "EAGER", "PYTHONUNBUFFERED": "1"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    if name[-1].isdigit():
        environment["CUDA_DEVICE_MAX_CONNECTIONS"] = name.split()[1]
    command = [sys.executable, __file__, "--part", name, "--seconds", str(seconds), *(["--dry-run"] if dry else [])]
    return run_process(command, environment, seconds + GRACE_S)


def machine(dry: bool) -> dict[str, Any]:
    """What was measured. torch is imported here, and no context made on the device: that is the parts' own."""
    import torch
    import triton

    found = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda, "dry_run": dry}
    if not dry:
        found["device"] = device_text()
    return found


def plot(figures: dict[str, Any], path: Path) -> None:
    """Eta over communication / GEMM, a point a shape and link."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = figures.get("overlap", {}).get("rows", [])
    figure, axes = plt.subplots(figsize=(7, 4))
    for link in sorted({row["link"] for row in rows}):
        mine = [row for row in rows if row["link"] == link]
        axes.scatter(
            [row["comm_ms"] / row["cublas_ms"] for row in mine], [row["eta"] for row in mine], label=link, s=18
        )
    axes.axhline(1.0, linewidth=0.5)
    axes.set(xscale="log", xlabel="communication alone / cuBLAS alone", ylabel="eta", title="one GPU, one rank")
    axes.legend()
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go, after every part")
    parser.add_argument("--plot", type=Path, help="where a plot goes")
    parser.add_argument("--only", choices=SECONDS, action="append", help="this part; may be given several times")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
    parser.add_argument("--dry-run", action="store_true", help="the interpreter instead of a GPU; figures mean nothing")
    parser.add_argument("--part", choices=SECONDS, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        return run_part(options.part, options.dry_run, options.seconds)
    import torch

    if not torch.cuda.is_available() and not options.dry_run:
        print("no CUDA device: this measures one; try --dry-run, and tests/kernels checks without", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    end = time.perf_counter() + options.budget
    figures: dict[str, Any] = {"what": "one GPU standing for one rank; not a figure of several GPUs"}
    figures |= {"arguments": sys.argv[1:], "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    figures |= machine(options.dry_run)
    names = [name for name in SECONDS if not options.only or name in options.only]
    try:
        for name in names:
            # The time that is left, divided as the parts that are left would have it; grace is for what hangs.
            left = end - time.perf_counter() - GRACE_S
            share = SECONDS[name] / sum(SECONDS[each] for each in names[names.index(name) :])
            if left < 5:
                figures[name] = {"rows": [], "how": "no time left"}
                continue
            figures[name] = measure(name, options.dry_run, left * share)
            save(options.json, figures)
            found = figures[name]
            if found["how"] == INTERRUPTED:
                break
            counts = f"{len(found['rows'])} rows, {found['wrong_rows']} wrong, {found['seconds']:.0f} s"
            summary = f"{name}: {counts}, {found['how']}"
            print(
                "\n".join([summary, *(json.dumps(row) for row in found["rows"]), found.get("stderr", "")]), flush=True
            )
    finally:
        figures["seconds"] = options.budget - (end - time.perf_counter())
        save(options.json, figures)
    if options.plot:
        try:
            plot(figures, options.plot)
        except (ImportError, KeyError, ValueError) as error:
            print(f"no plot: {error}", file=sys.stderr)
    # A part that an interrupt left out has no entry.
    ends = {name: figures.get(name, {"how": "left out"}) for name in names}
    bad = [name for name, found in ends.items() if found.get("wrong_rows") or found["how"] != ENDED]
    if bad:
        print(f"failed parts: {', '.join(bad)}", file=sys.stderr)
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
