"""Holds the simulator against what was measured on this project's own hosts (docs/results), and prints every row.

    python scripts/validate_simulator.py

Step times of `compare_*.json` and single layers of `linear_*.json`, serial and overlapped; profile: netlab. Errors are
of the model; rows whose figures went into the profile are among the linear ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.config import load_launch_config, without_overlap
from megatron_overlap.config.cluster import load_cluster_profile, with_hosts
from megatron_overlap.simulate.job import job_of
from megatron_overlap.simulate.linear import Choice, Linear
from megatron_overlap.simulate.play import Played
from megatron_overlap.simulate.step import simulate_step
from megatron_overlap.tune.cost import CostModel

ROOT = Path(__file__).resolve().parents[1]
# The config of each result, and what was different when it was taken.
SMALLER = ("model.hidden_size=512", "model.ffn_hidden_size=1408")
STEPS = {
    "compare_llama_netlab.json": ("llama_tp2_netlab.yaml", SMALLER),
    "compare_llama_20gbps.json": ("llama_tp2_netlab.yaml", SMALLER),
}


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


def steps() -> Iterator[Row]:
    """Whole training steps, overlap off and on."""
    for name, (config, overrides) in STEPS.items():
        runs = json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))["runs"]
        gbps = runs[0]["link"]["gbps"]
        loaded = load_launch_config(ROOT / "configs" / config, [*overrides, f"launch.hosts.gbps={gbps}"])
        model = CostModel(with_hosts(load_cluster_profile("netlab"), gbps, 1))
        for run in runs:
            if run["name"].endswith("_baseline"):
                used = without_overlap(loaded)
            elif "serial" in run["name"]:
                continue
            else:
                used = loaded
            step = simulate_step(job_of(used), model)
            yield Row(f"{name}: {run['name']}, {gbps:g} Gbit/s", run["step_time_ms"]["median"], step.step_us / 1e3)


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
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    show("training step", list(steps()))
    show("one linear layer", list(linears()))


if __name__ == "__main__":
    main()
