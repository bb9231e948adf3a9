"""Compares the simulator with the measurements on this project's hosts (docs/results), row by row.

    python scripts/validate_simulator.py
    python scripts/validate_simulator.py --measure     # calibrates and measures the steps first, about 40 minutes
    python scripts/validate_simulator.py --more        # launches the pairs with an unclear order again first

The training steps of `step_times.json` are compared with the profile that was calibrated between them (see
`step_times.py`), the layers of `linear_*.json` with the profile `netlab`; each without and with overlap. Errors are
those of the model. Some linear rows are among the figures of the profile. Beside the steps stands the deviation of
single launches from their median. The order of a pair is checked for all pairs, and for the pairs whose means are more
than two standard errors apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from step_times import ROOT, STEPS, Measured, apart, clarify_order, measure, measured, model_of, variants

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config.cluster import ClusterProfile, load_cluster_profile, with_hosts
from megatron_overlap.tools.simulate.event_simulator import SimulatedRun
from megatron_overlap.tools.simulate.job import job_of
from megatron_overlap.tools.simulate.linear import Linear, LinearOverlap
from megatron_overlap.tools.simulate.step import simulate_step


@dataclass(frozen=True)
class Row:
    """A measured time and the model's, in ms."""

    what: str
    measured: float
    model: float
    launches: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        """Percent."""
        return 100 * (self.model / self.measured - 1)

    @property
    def scatter(self) -> list[float]:
        """Deviation of each launch from the median, in percent."""
        return [100 * (each / self.measured - 1) for each in self.launches]


def steps(profile: ClusterProfile, found: Iterable[Measured]) -> Iterator[Row]:
    """Whole training steps, overlap off and on."""
    for one in found:
        for name, config in variants(one.shape).items():
            step = simulate_step(job_of(config), model_of(config, profile))
            launches = one.launches_ms[name]
            what = f"{name} overlap, {one.shape.config} {', '.join(one.shape.overrides)}"
            yield Row(what, statistics.median(launches), step.step_us / 1e3, tuple(launches))


def ordered(rows: list[Row]) -> list[bool]:
    """For each pair without and with overlap: whether the model has the right order."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return [(off.measured > on.measured) == (off.model > on.model) for off, on in pairs]


def linears() -> Iterator[Row]:
    """One linear layer."""
    for name in ("linear_2_hosts.json", "linear_4_hosts.json"):
        for row in json.loads((ROOT / "docs" / "results" / name).read_text(encoding="utf-8"))["rows"]:
            for key, choice in (
                ("serial_ms", LinearOverlap("stock")),
                ("overlap_ms", LinearOverlap("p2p", split="all")),
            ):
                yield Row(
                    f"{row['ranks']} hosts {row['op']} {row['direction']} {key[:-3]}, {row['gbps']:.2f} Gbit/s",
                    row[key],
                    linear_ms(row, choice),
                )


def linear_ms(row: dict[str, Any], choice: LinearOverlap) -> float:
    """A row of the linear benchmark on the model; `out_features` and `in_features` are over all ranks."""
    ranks, column = row["ranks"], row["op"] == "ag_gemm"
    model = CostModel(with_hosts(load_cluster_profile("netlab"), row["gbps"], 1))
    n = row["out_features"] // (ranks if column else 1)
    k = row["in_features"] // (1 if column else ranks)
    linear = Linear(model, model.link(ranks), choice, row["rows"], n, k)
    simulated: list[SimulatedRun] = [linear.column_forward() if column else linear.row_forward()]
    if row["direction"] != "forward":
        simulated.append(linear.column_backward() if column else linear.row_backward())
    return sum(one.time_us for one in simulated) / 1e3


def show(title: str, rows: list[Row]) -> None:
    """Print rows and a summary of their errors."""
    print(f"| {title} | measured ms | model ms | error % | single launches % |\n|---|---|---|---|---|")
    for row in rows:
        scatter = ", ".join(f"{each:+.1f}" for each in row.scatter)
        print(f"| {row.what} | {row.measured:.1f} | {row.model:.1f} | {row.error:+.1f} | {scatter} |")
    print(f"\n{len(rows)} rows: {_of([row.error for row in rows])}")
    # The median launch of each row has a deviation of zero.
    others = [each for row in rows for each in row.scatter if each]
    if others:
        print(f"Single launches against the median of their row: {_of(others)}")
    print()


def _of(errors: list[float]) -> str:
    sizes = [abs(each) for each in errors]
    return f"median error {statistics.median(sizes):.1f} %, worst {max(sizes):.1f} %"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="first measure a profile and step times anew")
    parser.add_argument("--more", action="store_true", help="first launch the pairs with an unclear order again")
    parser.add_argument("--shapes", type=int, help="with --measure: only the first SHAPES shapes")
    parser.add_argument("--steps", type=Path, default=STEPS, help="file of profile and step times")
    options = parser.parse_args()
    if options.measure:
        measure(options.shapes, options.steps)
    if options.more:
        clarify_order(options.steps)
    profile, found = measured(options.steps)
    rows = list(steps(profile, found))
    show("training step", rows)
    right = ordered(rows)
    clear = [each for each, one in zip(right, found, strict=True) if apart(one.launches_ms)]
    print(f"Order of a pair: right in {sum(right)} of {len(right)}.")
    print(f"Order of the pairs more than two standard errors apart: right in {sum(clear)} of {len(clear)}.\n")
    show("one linear layer", list(linears()))


if __name__ == "__main__":
    main()
