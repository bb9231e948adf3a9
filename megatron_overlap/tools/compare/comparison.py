"""From the records of interleaved runs to one comparison. Pure.

The first run is the reference. Step times are those of the slowest rank; the first iterations of every launch are left
out of them (buffers are made, kernels chosen, pages touched), but not out of the losses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from megatron_overlap.tools.compare.peak_flops import Peak
from megatron_overlap.tools.compare.stats import Spread, max_deviation, paired_ratios
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecord, StepExposed

WARM_UP_ITERATIONS = 2


@dataclass(frozen=True)
class Workload:
    """What one iteration of a run does.

    Attributes:
        tokens: tokens of all ranks; None where they are not known.
        flops: model FLOPs of all ranks; None where they are not known.
        flops_convention: what counts, or why they are not known.
        devices: ranks; None where the number is not known, and then `flops` are those of one.
    """

    tokens: int | None
    flops: float | None
    flops_convention: str
    devices: int | None


@dataclass(frozen=True)
class Side:
    """One of the launches that are compared, over all rounds.

    Attributes:
        name: of its config.
        workload: what its iterations do.
        peak: best rate of its device; None where it is not known.
        link: what carried its communication.
        records: one for each round.
    """

    name: str
    workload: Workload
    peak: Peak | None
    link: Mapping[str, Any]
    records: tuple[RunRecord, ...]

    @property
    def timed_rounds_ms(self) -> list[list[float]]:
        """The step times that count, of each round."""
        return [list(record.step_time_ms[WARM_UP_ITERATIONS:]) for record in self.records]


@dataclass(frozen=True)
class RunSummary:
    """The figures of one side; None where something is not known."""

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
    own_loss_deviation: float | None
    """Largest between two rounds of this same run."""
    own_grad_norm_deviation: float | None
    link: Mapping[str, Any]
    plugin: PluginReport | None
    typical: TypicalStep
    exposed: ExposedSummary | None = None

    @property
    def floor_ms(self) -> float | None:
        """Compute-only floor: the median step less the median of its exposed communication; None without events."""
        return None if self.exposed is None else self.step_time_ms.median - self.exposed.step_ms.median


@dataclass(frozen=True)
class TypicalStep:
    """The timed step whose time is nearest the median of all; the earlier one of two.

    Attributes:
        round: from 1.
        iteration: its number in the run.
        time_ms: of the slowest rank.
    """

    round: int
    iteration: int
    time_ms: float


@dataclass(frozen=True)
class ExposedSummary:
    """Exposed communication of one side over its timed steps, each the mean over ranks; `overlap.trace` records it.

    Attributes:
        step_ms: of a step.
        share: of the step time.
        by_op: milliseconds a step by op and direction, the mean over steps; longest first.
        median_by_op: the same, the median over steps.
    """

    step_ms: Spread
    share: float
    by_op: Mapping[tuple[str, str], float]
    median_by_op: Mapping[tuple[str, str], float]


@dataclass(frozen=True)
class AgainstReference:
    """How one side stands to the reference."""

    name: str
    speedup: Spread
    speedup_rounds: list[float]
    max_loss_deviation: float | None
    max_grad_norm_deviation: float | None
    memory_ratio: float | None


@dataclass(frozen=True)
class Attribution:
    """What makes the speedup: each a ratio of step times; in every round their product is the whole."""

    faster_collective: Spread
    """Reference over the serial run: the same messages as with overlap, but nothing computed meanwhile."""
    overlap: Spread
    """The serial run over the overlapped one."""


@dataclass(frozen=True)
class Comparison:
    """The result. `against` has one entry for each run but the first; the first of them is the headline."""

    runs: list[RunSummary]
    against: list[AgainstReference]
    attribution: Attribution | None
    device: Mapping[str, Any]
    versions: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def headline(self) -> AgainstReference:
        return self.against[0]


def compare(
    sides: Sequence[Side], *, serial: int | None = None, settings: Mapping[str, Any] | None = None
) -> Comparison:
    """Compare every side with the first.

    Args:
        sides: at least two, with the same number of rounds.
        serial: index of the run that is not overlapped but for which the collectives are the plugin's; with it the
            speedup of the second side is taken apart.
        settings: what a reader needs to know of how it was measured; carried through.

    Raises:
        NotComparableError: a loss or grad-norm is a number in one run only.
    """
    reference = sides[0]
    against = [_against(reference, side) for side in sides[1:]]
    attribution = None
    if serial is not None:
        first, second, third = (side.timed_rounds_ms for side in (reference, sides[1], sides[serial]))
        attribution = Attribution(Spread.of(paired_ratios(first, third)), Spread.of(paired_ratios(third, second)))
    meta = reference.records[0].meta
    return Comparison(
        runs=[summarize(side) for side in sides],
        against=against,
        attribution=attribution,
        device={"kind": meta.get("device"), "name": meta.get("device_name"), "world_size": meta.get("world_size")},
        versions=meta.get("versions", {}),
        settings=settings or {},
    )


def summarize(side: Side) -> RunSummary:
    """The figures of one side over its rounds."""
    rounds = side.timed_rounds_ms
    step_time = Spread.of([time for times in rounds for time in times])
    work, seconds = side.workload, step_time.median / 1000
    tflops = work.flops / seconds / (work.devices or 1) / 1e12 if work.flops is not None else None
    tokens_per_s = work.tokens / seconds if work.tokens is not None else None
    peak = side.peak
    first = side.records[0]
    losses = [max_deviation(first.losses, other.losses, "loss") for other in side.records[1:]]
    norms = [max_deviation(first.grad_norms, other.grad_norms, "grad-norm") for other in side.records[1:]]
    return RunSummary(
        name=side.name,
        step_time_ms=step_time,
        step_times_ms=rounds,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=tokens_per_s / work.devices if tokens_per_s is not None and work.devices else None,
        tflops_per_device=tflops,
        mfu=tflops / peak.tflops if tflops is not None and peak is not None else None,
        peak_tflops=peak.tflops if peak is not None else None,
        peak_source=peak.source if peak is not None else "not known",
        flops_convention=work.flops_convention,
        peak_memory_bytes=_peak_memory(side),
        losses=list(first.losses),
        grad_norms=list(first.grad_norms),
        own_loss_deviation=_largest(losses),
        own_grad_norm_deviation=_largest(norms),
        link=side.link,
        plugin=first.report,
        typical=_typical(side, step_time.median),
        exposed=_exposed(side),
    )


def _typical(side: Side, median_ms: float) -> TypicalStep:
    steps = [
        TypicalStep(number, iteration, time)
        for number, record in enumerate(side.records, start=1)
        for iteration, time in list(zip(record.iterations, record.step_time_ms, strict=True))[WARM_UP_ITERATIONS:]
    ]
    return min(steps, key=lambda step: abs(step.time_ms - median_ms))


def _exposed(side: Side) -> ExposedSummary | None:
    steps: list[StepExposed] = []
    for record in side.records:
        if record.exposed is None:
            return None
        steps += record.exposed[WARM_UP_ITERATIONS:]
    total_ms = sum(time for times in side.timed_rounds_ms for time in times)
    keys = {key for step in steps for key in step.by_op}
    by_op = {key: sum(step.by_op.get(key, 0.0) for step in steps) / len(steps) for key in keys}
    return ExposedSummary(
        step_ms=Spread.of([step.total_ms for step in steps]),
        share=sum(step.total_ms for step in steps) / total_ms,
        by_op=dict(sorted(by_op.items(), key=lambda item: (-item[1], item[0]))),
        median_by_op={key: median(step.by_op.get(key, 0.0) for step in steps) for key in keys},
    )


def _against(reference: Side, side: Side) -> AgainstReference:
    pairs = list(zip(reference.records, side.records, strict=True))
    ratios = paired_ratios(reference.timed_rounds_ms, side.timed_rounds_ms)
    losses = [max_deviation(a.losses, b.losses, f"{side.name}: loss") for a, b in pairs]
    norms = [max_deviation(a.grad_norms, b.grad_norms, f"{side.name}: grad-norm") for a, b in pairs]
    memory = [
        b.peak_memory_bytes / a.peak_memory_bytes
        for a, b in pairs
        if a.peak_memory_bytes is not None and b.peak_memory_bytes is not None
    ]
    return AgainstReference(
        name=side.name,
        speedup=Spread.of(ratios),
        speedup_rounds=ratios,
        max_loss_deviation=_largest(losses),
        max_grad_norm_deviation=_largest(norms),
        # Not of the two largest: a resident set differs from launch to launch by a few percent.
        memory_ratio=median(memory) if memory else None,
    )


def _peak_memory(side: Side) -> int | None:
    return max(
        (record.peak_memory_bytes for record in side.records if record.peak_memory_bytes is not None), default=None
    )


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
