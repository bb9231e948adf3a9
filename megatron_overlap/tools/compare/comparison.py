"""Compares the records of interleaved runs. Pure.

The first run is the reference. The step time is that of the slowest rank. The first iterations of each launch allocate
buffers and select kernels: step times leave them out, losses do not.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from statistics import median
from typing import Any, Self

import numpy as np

from megatron_overlap.tools.compare.flops import Peak
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecord, deviation

WARM_UP_ITERATIONS = 2


class NotComparableError(ValueError):
    """Two series of losses or gradient norms cannot be compared; names the iteration."""


@dataclass(frozen=True)
class Spread:
    """Median, 20th and 80th percentile of a sample."""

    median: float
    p20: float
    p80: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """The spread of a sample of at least one value."""
        return cls(*(float(value) for value in np.percentile(values, (50, 20, 80))))


@dataclass(frozen=True)
class Workload:
    """Tokens and model FLOPs of one iteration on all ranks; None where unknown. Without `devices`: of one rank."""

    tokens: int | None
    flops: float | None
    flops_convention: str  # what the FLOPs include, or why they are unknown
    devices: int | None


@dataclass(frozen=True)
class Launched[Record]:
    """All launches of one config: the network, and one record for each round."""

    name: str
    link: Mapping[str, Any]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Side(Launched[RunRecord]):
    """All launches of one config that trains. `peak` is None if the peak rate is unknown."""

    workload: Workload
    peak: Peak | None

    @property
    def timed_rounds_ms(self) -> list[list[float]]:
        return [list(record.step_time_ms[WARM_UP_ITERATIONS:]) for record in self.records]


@dataclass(frozen=True)
class TypicalStep:
    """The timed step nearest to the median of all timed steps; the earlier one of two. Rounds count from 1."""

    round: int
    iteration: int
    step_time_ms: float


@dataclass(frozen=True)
class ExposedOp:
    """Waits for one op in one direction: mean and median over the timed steps."""

    op: str
    direction: str
    ms: float
    median_ms: float


@dataclass(frozen=True)
class ExposedSummary:
    """Exposed communication of one run over its timed steps, the mean over ranks; recorded with `overlap.trace`."""

    step_ms: Spread
    share_of_step: float  # the total over the total step time
    floor_ms: float  # compute-only floor: the median step time minus the median exposed communication
    by_op: list[ExposedOp]  # the largest mean first


@dataclass(frozen=True)
class RunSummary:
    """The figures of one run; None where a figure is unknown."""

    name: str
    step_time_ms: Spread
    step_times_ms: list[list[float]]
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    tflops_per_device: float | None
    mfu: float | None
    peak_tflops: float | None
    peak_source: str
    flops_convention: str
    peak_memory_bytes: int | None
    losses: list[float | None]
    grad_norms: list[float | None]
    own_loss_deviation: float | None  # the largest between two rounds of this run
    own_grad_norm_deviation: float | None
    link: Mapping[str, Any]
    plugin: PluginReport | None
    typical_step: TypicalStep
    exposed: ExposedSummary | None = None
    evaluation_ms: Spread | None = None


@dataclass(frozen=True)
class AgainstReference:
    """One run against the reference; `evaluation_speedup` is None where a run has no evaluation."""

    name: str
    speedup: Spread
    speedup_rounds: list[float]
    max_loss_deviation: float | None
    max_grad_norm_deviation: float | None
    memory_ratio: float | None
    evaluation_speedup: Spread | None = None


@dataclass(frozen=True)
class Attribution:
    """The factors of the speedup: reference over serial run, which does not overlap, and that over overlapped run."""

    faster_collective: Spread
    overlap: Spread


@dataclass(frozen=True)
class Compared[Run]:
    """All runs of a comparison, the reference first, and how they were measured."""

    runs: Sequence[Run]
    versions: Mapping[str, Any]
    device: Mapping[str, Any]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Comparison(Compared[RunSummary]):
    """`against` has one entry for each run except the reference; the first entry is the headline."""

    against: list[AgainstReference]
    attribution: Attribution | None

    @property
    def headline(self) -> AgainstReference:
        return self.against[0]


def compare(sides: Sequence[Side], *, serial: bool = False, settings: Mapping[str, Any] | None = None) -> Comparison:
    """Compare every side with the first. All sides have the same number of rounds. Raises as `max_deviation`.

    The attribution needs a `serial` run, the last side. `settings` are in the report: how the runs were measured.
    """
    reference, attribution = sides[0], None
    if serial:
        first, second, third = (side.timed_rounds_ms for side in (reference, sides[1], sides[-1]))
        attribution = Attribution(Spread.of(paired_ratios(first, third)), Spread.of(paired_ratios(third, second)))
    meta = reference.records[0].meta
    return Comparison(
        runs=[_summarize(side) for side in sides],
        against=[_against(reference, side) for side in sides[1:]],
        attribution=attribution,
        device={"kind": meta.get("device"), "name": meta.get("device_name"), "world_size": meta.get("world_size")},
        versions=meta.get("versions", {}),
        settings=settings or {},
    )


def _summarize(side: Side) -> RunSummary:
    rounds = side.timed_rounds_ms
    step_time = Spread.of([time for times in rounds for time in times])
    work, seconds = side.workload, step_time.median / 1000
    tflops = work.flops / seconds / (work.devices or 1) / 1e12 if work.flops is not None else None
    tokens_per_s = work.tokens / seconds if work.tokens is not None else None
    peak, first = side.peak, side.records[0]
    evaluations = [time for record in side.records for time in record.evaluation_ms]
    own = [(first, other) for other in side.records[1:]]
    steps = [
        TypicalStep(number, iteration, time)
        for number, record in enumerate(side.records, start=1)
        for iteration, time in list(zip(record.iterations, record.step_time_ms, strict=True))[WARM_UP_ITERATIONS:]
    ]
    return RunSummary(
        name=side.name,
        step_time_ms=step_time,
        step_times_ms=rounds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / work.devices if tokens_per_s is not None and work.devices else None,
        tflops_per_device=tflops,
        mfu=tflops / peak.tflops if tflops is not None and peak is not None else None,
        peak_tflops=peak.tflops if peak is not None else None,
        peak_source=peak.source if peak is not None else "unknown",
        flops_convention=work.flops_convention,
        peak_memory_bytes=_largest(record.peak_memory_bytes for record in side.records),
        losses=list(first.losses),
        grad_norms=list(first.grad_norms),
        own_loss_deviation=_deviation(own, "losses", "loss"),
        own_grad_norm_deviation=_deviation(own, "grad_norms", "grad-norm"),
        link=side.link,
        plugin=first.report,
        typical_step=min(steps, key=lambda step: abs(step.step_time_ms - step_time.median)),
        exposed=_exposed(side, step_time),
        evaluation_ms=Spread.of(evaluations) if evaluations else None,
    )


def _exposed(side: Side, step_time_ms: Spread) -> ExposedSummary | None:
    if not all(record.exposed for record in side.records):
        return None
    steps = [step for record in side.records for step in record.exposed[WARM_UP_ITERATIONS:]]
    total_ms = sum(time for times in side.timed_rounds_ms for time in times)
    ops = []
    for op, direction in {key for step in steps for key in step.by_op}:
        times = [step.by_op.get((op, direction), 0.0) for step in steps]
        ops.append(ExposedOp(op, direction, sum(times) / len(times), median(times)))
    totals = [step.total_ms for step in steps]
    step_ms, share = Spread.of(totals), sum(totals) / total_ms
    ops.sort(key=lambda each: (-each.ms, each.op, each.direction))
    return ExposedSummary(step_ms, share, step_time_ms.median - step_ms.median, ops)


def _against(reference: Side, side: Side) -> AgainstReference:
    pairs = list(zip(reference.records, side.records, strict=True))
    ratios = paired_ratios(reference.timed_rounds_ms, side.timed_rounds_ms)
    evaluated = [(a.evaluation_ms, b.evaluation_ms) for a, b in pairs if a.evaluation_ms and b.evaluation_ms]
    peaks = [(a.peak_memory_bytes, b.peak_memory_bytes) for a, b in pairs]
    memory = [b / a for a, b in peaks if a is not None and b is not None]
    return AgainstReference(
        name=side.name,
        speedup=Spread.of(ratios),
        speedup_rounds=ratios,
        max_loss_deviation=_deviation(pairs, "losses", f"{side.name}: loss"),
        max_grad_norm_deviation=_deviation(pairs, "grad_norms", f"{side.name}: grad-norm"),
        # Ratio within a round: the resident set differs by a few percent from launch to launch.
        memory_ratio=median(memory) if memory else None,
        evaluation_speedup=Spread.of([median(a) / median(b) for a, b in evaluated]) if evaluated else None,
    )


def paired_ratios(reference: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> list[float]:
    """For each round, the median of the reference over that of the other: slow changes of the machine cancel."""
    return [median(base) / median(times) for base, times in zip(reference, other, strict=True)]


def max_deviation(reference: Sequence[float | None], other: Sequence[float | None], what: str) -> float | None:
    """The largest relative difference between two series of the same length; None if they share no known value.

    Raises NotComparableError if at one iteration only one of the two is finite.
    """
    pairs = list(zip(reference, other, strict=True))
    for iteration, (a, b) in enumerate(pairs, start=1):
        if a is not None and b is not None and math.isfinite(a) != math.isfinite(b):
            raise NotComparableError(f"{what} of iteration {iteration}: {a} in one run and {b} in the other")
    return max((each for each in starmap(deviation, pairs) if not math.isnan(each)), default=None)


def _deviation(pairs: Sequence[tuple[RunRecord, RunRecord]], series: str, what: str) -> float | None:
    return _largest(max_deviation(getattr(a, series), getattr(b, series), what) for a, b in pairs)


def _largest[T: float](values: Iterable[T | None]) -> T | None:
    return max((value for value in values if value is not None), default=None)


def comparison_content(comparison: Comparison) -> dict[str, Any]:
    """The content of compare.json."""
    against = comparison.against
    content = {
        "runs": comparison.runs,
        "speedup": comparison.headline.speedup,
        "max_loss_deviation": _largest(entry.max_loss_deviation for entry in against),
        "max_grad_norm_deviation": _largest(entry.max_grad_norm_deviation for entry in against),
        "link": comparison.runs[0].link,
        "versions": comparison.versions,
        "device": comparison.device,
        "against_first": against,
        "settings": comparison.settings,
    }
    if comparison.attribution is not None:
        content["attribution"] = comparison.attribution
    return content
