"""Compares generation on Megatron's engines: times and tokens of interleaved runs. Pure.

The first run is the reference. A launch times every workload once, after a shorter call with the same prompts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.compare.comparison import Compared, Launched, Spread
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecordError, read_object, read_reports

RESULT_FILE = "generation.json"
# Figures of a workload, as the script writes them, and their labels.
METRICS = {"first_token_ms": "first token, ms", "decode_ms": "ms per token", "tokens_per_s": "tokens/s"}


@dataclass(frozen=True, order=True)
class Workload:
    """Random prompts of one length: `128x4` is a batch of 4 prompts of 128 tokens."""

    prompt_tokens: int
    batch: int

    @classmethod
    def parse(cls, text: str) -> Self:
        return cls(*map(int, text.split("x")))

    def __str__(self) -> str:
        return f"{self.prompt_tokens}x{self.batch}"

    @property
    def label(self) -> str:
        """`128 tokens, batch 4`."""
        return f"{self.prompt_tokens:,} tokens, batch {self.batch}"


@dataclass(frozen=True)
class Measured:
    """One workload of one launch: the figures of `METRICS` by name, and the generated tokens of every prompt."""

    figures: Mapping[str, float]
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class GenerationRecord:
    """One launch: the engine that ran, the workloads, versions and device, and the plugin's report."""

    engine: str
    workloads: Mapping[Workload, Measured]
    meta: Mapping[str, Any]
    report: PluginReport | None


@dataclass(frozen=True)
class WorkloadSummary(Workload):
    """The `METRICS` of one workload of one run over the rounds, and its prompts of all rounds."""

    figures: Mapping[str, Spread]
    speedups: Mapping[str, Spread]  # reference over run in each round, tokens/s inverted; none of the reference
    sequences: int
    equal_sequences: int  # those with the tokens of the reference
    first_difference: int | None  # smallest index of another token


@dataclass(frozen=True)
class GenerationRun:
    """The figures of one run, by workload."""

    name: str
    engine: str
    tokens_equal: bool  # whether every sequence has the tokens of the reference
    workloads: tuple[WorkloadSummary, ...]
    link: Mapping[str, Any]
    plugin: PluginReport | None


GenerationComparison = Compared[GenerationRun]
_Side = Launched[GenerationRecord]


def read_generation(run_dir: Path, config: LaunchConfig) -> GenerationRecord:
    """Reads what one launch of `scripts/generate_gpt.py` wrote.

    Raises RunRecordError if a file is missing or incomplete.
    """
    path = run_dir / RESULT_FILE
    content = read_object(path)
    try:
        workloads = {}
        for row in content["workloads"]:
            figures = {name: float(row[name]) for name in METRICS}
            workload = Workload(row["prompt_tokens"], row["batch"])
            workloads[workload] = Measured(figures, tuple(map(tuple, row["tokens"])))
        engines = "/".join({str(row["engine"]) for row in content["workloads"]})
        return GenerationRecord(engines, workloads, content["meta"], read_reports(run_dir, config.world_size))
    except KeyError as error:
        raise RunRecordError(f"{path}: {error}: the key is missing") from error


def compare_generation(sides: Sequence[_Side], settings: Mapping[str, Any]) -> GenerationComparison:
    """Compares each run with the first. All runs have the same workloads and number of rounds."""
    reference, meta = sides[0], sides[0].records[0].meta
    device = {"kind": meta["device"], "name": meta["device_name"], "world_size": meta["world_size"]}
    runs = []
    for side in sides:
        first = side.records[0]
        workloads = tuple(_summarize(workload, side, reference) for workload in first.workloads)
        equal = all(each.equal_sequences == each.sequences for each in workloads)
        runs.append(GenerationRun(side.name, first.engine, equal, workloads, side.link, first.report))
    return GenerationComparison(runs, meta["versions"], device, settings)


def _summarize(workload: Workload, side: _Side, reference: _Side) -> WorkloadSummary:
    mine, base = ([record.workloads[workload] for record in each.records] for each in (side, reference))
    speedups = {}
    if side is not reference:
        for name in METRICS:
            pairs = [(a.figures[name], b.figures[name]) for a, b in zip(base, mine, strict=True)]
            speedups[name] = Spread.of([b / a if name == "tokens_per_s" else a / b for a, b in pairs])
    places = [
        first_difference(a, b)
        for one, other in zip(base, mine, strict=True)
        for a, b in zip(one.tokens, other.tokens, strict=True)
    ]
    return WorkloadSummary(
        **vars(workload),
        figures={name: Spread.of([each.figures[name] for each in mine]) for name in METRICS},
        speedups=speedups,
        sequences=len(places),
        equal_sequences=places.count(None),
        first_difference=min((place for place in places if place is not None), default=None),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or that only one of the two has; None: they are equal."""
    return next((place for place, (one, other) in enumerate(zip_longest(a, b)) if one != other), None)
