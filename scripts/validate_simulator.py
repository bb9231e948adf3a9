"""Holds the simulator against what was measured on this project's own hosts (docs/results), and prints every row.

    python scripts/validate_simulator.py
    python scripts/validate_simulator.py --measure     # measures the training steps first, about 10 minutes

Training steps of `step_times.json` and layers of `linear_*.json`, without and with overlap; profile: netlab. Errors
are of the model; rows whose figures went into the profile are among the linear ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap import cli
from megatron_overlap.config import load_launch_config, without_overlap
from megatron_overlap.config.cluster import load_cluster_profile, with_hosts
from megatron_overlap.simulate.job import job_of
from megatron_overlap.simulate.linear import Choice, Linear
from megatron_overlap.simulate.play import Played
from megatron_overlap.simulate.step import simulate_step
from megatron_overlap.tune.cost import CostModel

ROOT = Path(__file__).resolve().parents[1]
STEPS = ROOT / "docs" / "results" / "step_times.json"
CONFIG = "llama_tp2_netlab.yaml"
# Shapes, lengths and link rates: each is launched with the overlap and without.
MEASURED = (
    ("model.num_layers=2", "launch.hosts.gbps=0.3"),
    ("model.num_layers=2", "launch.hosts.gbps=0.8"),
    ("model.num_layers=2", "launch.hosts.gbps=2"),
    ("model.num_layers=2", "launch.hosts.gbps=8"),
    ("model.num_layers=2", "launch.hosts.gbps=0.5", "model.hidden_size=512", "model.ffn_hidden_size=1408"),
    ("model.num_layers=2", "launch.hosts.gbps=0.5", "train.seq_length=512"),
    ("model.num_layers=2", "launch.hosts.gbps=1", "train.global_batch_size=4"),
    ("launch.hosts.gbps=0.5", "model.num_layers=1"),
)


@dataclass(frozen=True)
class Row:
    """A measured time and the model's, in ms."""

    what: str
    measured: float
    model: float

    @property
    def error(self) -> float:
        """Percent."""
        return 100 * (self.model / self.measured - 1)


def measure(shapes: int | None) -> None:
    """Launches the first so many shapes, or all, with and without the overlap, two rounds each: on a quiet machine."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, overrides in enumerate(MEASURED[:shapes]):
            out = Path(folder) / str(number)
            argv = ["compare", str(ROOT / "configs" / CONFIG), "--rounds", "2", "--output", str(out), *overrides]
            if cli.main(argv) != 0:
                sys.exit(f"not measured: {' '.join(overrides)}")
            result = json.loads((out / "compare.json").read_text(encoding="utf-8"))
            times = {run["name"]: run["step_time_ms"]["median"] for run in result["runs"]}
            found.append({"overrides": overrides, "step_time_ms": times, "versions": result["versions"]})
    STEPS.write_text(json.dumps({"config": CONFIG, "runs": found}, indent=1) + "\n", encoding="utf-8")


def steps() -> Iterator[Row]:
    """Whole training steps, overlap off and on."""
    measured = json.loads(STEPS.read_text(encoding="utf-8"))
    for run in measured["runs"]:
        loaded = load_launch_config(ROOT / "configs" / measured["config"], run["overrides"])
        assert loaded.launch.hosts is not None
        model = CostModel(with_hosts(load_cluster_profile("netlab"), loaded.launch.hosts.gbps, 1))
        for name, time_ms in run["step_time_ms"].items():
            used = without_overlap(loaded) if name.endswith("_baseline") else loaded
            step = simulate_step(job_of(used), model)
            what = "without" if used is not loaded else "with"
            yield Row(f"{what} overlap, {', '.join(run['overrides'])}", time_ms, step.step_us / 1e3)


def ordered(rows: list[Row]) -> int:
    """In how many pairs, without and with overlap, the model says rightly which one is faster."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return sum((off.measured > on.measured) == (off.model > on.model) for off, on in pairs)


def linears() -> Iterator[Row]:
    """One linear layer."""
    for name in ("linear_2_hosts.json", "linear_4_hosts.json"):
        for row in json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))["rows"]:
            for key, choice in (("serial_ms", Choice("megatron")), ("overlap_ms", Choice("p2p", split="all"))):
                yield Row(
                    f"{row['ranks']} hosts {row['op']} {row['direction']} {key[:-3]}, {row['gbps']:.2f} Gbit/s",
                    row[key],
                    linear_ms(row, choice),
                )


def linear_ms(row: dict[str, Any], choice: Choice) -> float:
    """A row of the linear benchmark on the model; `out_features` and `in_features` are over all ranks."""
    ranks, column = row["ranks"], row["op"] == "ag_gemm"
    model = CostModel(with_hosts(load_cluster_profile("netlab"), row["gbps"], 1))
    n = row["out_features"] // (ranks if column else 1)
    k = row["in_features"] // (1 if column else ranks)
    linear = Linear(model, model.link(ranks), choice, row["rows"], n, k)
    played: list[Played] = [linear.column_forward() if column else linear.row_forward()]
    if row["direction"] != "forward":
        played.append(linear.column_backward() if column else linear.row_backward())
    return sum(one.time_us for one in played) / 1e3


def show(title: str, rows: list[Row]) -> None:
    """Print rows and what their errors come to."""
    print(f"| {title} | measured ms | model ms | error % |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.what} | {row.measured:.1f} | {row.model:.1f} | {row.error:+.1f} |")
    errors = [abs(row.error) for row in rows]
    print(f"\n{len(rows)} rows: median error {statistics.median(errors):.1f} %, worst {max(errors):.1f} %\n")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help=f"first measure the step times of {STEPS.name} anew")
    parser.add_argument("--shapes", type=int, help="with --measure: only the first so many of them")
    options = parser.parse_args()
    if options.measure:
        measure(options.shapes)
    rows = list(steps())
    show("training step", rows)
    print(f"Which of a pair is faster: right in {ordered(rows)} of {len(rows) // 2}.\n")
    show("one linear layer", list(linears()))


if __name__ == "__main__":
    main()
