"""A launch on the CPUs of this machine before it costs GPU hours: folded, with and without the overlap, compared."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
from rich.table import Table

from megatron_overlap.config import LaunchConfig, without_overlap
from megatron_overlap.tools.launch.downscale import Change
from megatron_overlap.tools.launch.execute import execute
from megatron_overlap.tools.launch.plan import plan
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecord, read_run

# Largest relative deviation from stock Megatron over the steps, (loss, grad-norm). fp32: another order of the same
# sums, as in docs/numerics.md. bf16: one eps for the loss, a mean over tokens; for the grad-norm what stock's own bf16
# is away from its fp32 there (1.6e-2), as less cannot be told from rounding. `train.precision=fp32` is sharper.
BOUNDS = {"fp32": (1e-5, 1e-5), "bf16": (2.0**-8, 2e-2)}
_RANK_BYTES = 1.2e9  # torch, Megatron and a tiny model
_MIN_RANKS, _MAX_RANKS = 2, 8


def ranks_here() -> int:
    """Ranks of a tiny model that this machine can hold: by its memory, and two for each core."""
    by_memory = int(psutil.virtual_memory().available / _RANK_BYTES)
    by_cores = 2 * len(os.sched_getaffinity(0))
    return max(_MIN_RANKS, min(by_memory, by_cores, _MAX_RANKS))


@dataclass(frozen=True)
class Step:
    """One step of both runs; None where a run knows no value."""

    iteration: int
    loss: tuple[float | None, float | None]
    grad_norm: tuple[float | None, float | None]


@dataclass(frozen=True)
class Rehearsal:
    """What came out.

    Attributes:
        steps: losses and grad-norms, stock Megatron's first.
        bounds: how far loss and grad-norm may be apart, relative.
        report: what the plugin did, None where it was off.
        failures: why the launch is not proven; empty where it is.
    """

    steps: tuple[Step, ...]
    bounds: tuple[float, float]
    report: PluginReport | None
    failures: tuple[str, ...]


def rehearse(
    folded: LaunchConfig, folder: Path, on_start: Callable[[LaunchConfig], None] = lambda config: None
) -> Rehearsal:
    """Run a folded config with and without the overlap and hold one against the other.

    A config without overlap is run once, and its losses must be finite.

    Args:
        folded: what `fold` returned.
        folder: gets a folder for each run.
        on_start: called with a config as its run starts.

    Raises:
        RunError: a rank failed.
        ArtefactError: a run recorded no steps.
    """
    stock = without_overlap(folded)
    configs = [stock, folded] if stock.overlap != folded.overlap else [folded]
    records = []
    for config in configs:
        on_start(config)
        planned = plan(config, folder / config.name)
        execute(planned)
        records.append(read_run(planned.run_dir, config.world_size, config.train.iterations))
    return judge(records[0], records[-1], folded)


def judge(stock: RunRecord, overlapped: RunRecord, folded: LaunchConfig) -> Rehearsal:
    """Whether two runs of a folded config are equal, and the overlap did what was asked for."""
    bounds = BOUNDS[folded.train.precision]
    steps = tuple(
        Step(number, (stock.losses[i], overlapped.losses[i]), (stock.grad_norms[i], overlapped.grad_norms[i]))
        for i, number in enumerate(overlapped.iterations)
    )
    failures = []
    for step in steps:
        for name, pair, bound in (("loss", step.loss, bounds[0]), ("grad-norm", step.grad_norm, bounds[1])):
            apart = deviation(*pair)
            if not apart <= bound:  # also where it is no number
                failures.append(f"step {step.iteration}: {name} {_pair(pair)}: {apart:.1e} apart, at most {bound:.1e}")
    report = overlapped.report
    asked = folded.overlap.tensor.method != "none" and folded.parallel.tensor > 1
    if asked and (report is None or not report.overlapped_calls):
        failures.append("overlap.tensor is on and no call was overlapped")
    return Rehearsal(steps, bounds, report, tuple(failures))


def deviation(a: float | None, b: float | None) -> float:
    """Relative distance; NaN where one is missing or not finite, which is within no bound."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.nan
    return abs(b - a) / abs(a) if a else abs(b - a)


def folding_table(changes: Sequence[Change]) -> Table:
    """What the rehearsal has otherwise, for a person."""
    table = Table("key", "config", "rehearsal", "because", title="folded", title_justify="left")
    for change in changes:
        table.add_row(change.key, change.was, change.now, change.why)
    return table


def steps_table(result: Rehearsal) -> Table:
    """Both runs beside each other."""
    table = Table("step", title="stock Megatron and overlap", title_justify="left")
    for name, bound in zip(("loss", "grad-norm"), result.bounds, strict=True):
        table.add_column(f"{name}: stock", justify="right")
        table.add_column("overlap", justify="right")
        table.add_column(f"apart (at most {bound:.1e})", justify="right")
    for step in result.steps:
        cells = []
        for pair in (step.loss, step.grad_norm):
            cells += [*(_number(value) for value in pair), f"{deviation(*pair):.1e}"]
        table.add_row(str(step.iteration), *cells)
    return table


def _pair(pair: tuple[float | None, float | None]) -> str:
    return f"{_number(pair[0])} and {_number(pair[1])}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.7g}"
