"""How the figures of a comparison are written for people: in the terminal's table and in the report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_overlap.measure.compare import Comparison, RunSummary
from megatron_overlap.measure.spread import Spread

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One line of the table: what it is, and a cell for each run."""

    label: str
    cells: tuple[str, ...]


def headline(result: Comparison) -> str:
    """The result in one sentence."""
    first = result.headline
    rounds = len(first.speedup_rounds)
    return f"{first.name} is {ratio(first.speedup)} as fast as {result.runs[0].name}, over {rounds} " + (
        "rounds" if rounds > 1 else "round"
    )


def attribution(result: Comparison) -> str | None:
    """What the speedup is made of, None where it was not taken apart."""
    parts = result.attribution
    if parts is None:
        return None
    return f"of it: faster collective: {ratio(parts.faster_collective)}, overlap: {ratio(parts.overlap)}"


def rows(result: Comparison) -> list[Row]:
    """The table, one column a run."""
    runs = result.runs
    reference = ("reference",)
    return [
        Row("step time, ms: median (p20 .. p80)", tuple(_spread(run.step_time_ms, 1) for run in runs)),
        Row("speedup: median (p20 .. p80)", (*reference, *(ratio(entry.speedup) for entry in result.against))),
        Row("tokens/s", tuple(f"{run.tokens_per_s:,.0f}" for run in runs)),
        Row("tokens/s per device", tuple(f"{run.tokens_per_s_per_device:,.0f}" for run in runs)),
        Row("TFLOP/s per device", tuple(_number(run.tflops_per_device, "{:.4g}") for run in runs)),
        Row("peak TFLOP/s per device", tuple(f"{run.peak_tflops:.4g}" for run in runs)),
        Row("MFU", tuple(_number(run.mfu, "{:.1%}") for run in runs)),
        Row("peak memory, MiB", _memory(result)),
        Row(
            "largest loss deviation, relative",
            (*reference, *(_number(entry.max_loss_deviation, "{:.1e}") for entry in result.against)),
        ),
        Row(
            "largest grad-norm deviation, relative",
            (*reference, *(_number(entry.max_grad_norm_deviation, "{:.1e}") for entry in result.against)),
        ),
        Row(
            "its own rounds differ by: loss, grad-norm",
            tuple(
                f"{_number(run.own_loss_deviation, '{:.1e}')}, {_number(run.own_grad_norm_deviation, '{:.1e}')}"
                for run in runs
            ),
        ),
        Row("overlapped calls, all ranks", tuple(_calls(run) for run in runs)),
        Row("calls on Megatron's own path", tuple(_fallbacks(run) for run in runs)),
    ]


def notes(result: Comparison) -> list[str]:
    """What a reader needs to know to believe the figures, one sentence each."""
    first = result.runs[0]
    lines = [
        f"Device: {result.device['name']} ({result.device['kind']}), {result.device['world_size']} ranks.",
        f"Peak: {first.peak_source}.",
        f"FLOPs: {first.flops_convention}.",
        "Versions: " + ", ".join(f"{name} {version}" for name, version in result.versions.items() if version) + ".",
    ]
    links = list(dict.fromkeys(str(run.link.get("description")) for run in result.runs))
    if len(links) == 1:
        lines.insert(1, f"Network: {links[0]}.")
    else:
        each = "; ".join(f"{run.name}: {run.link.get('description')}" for run in result.runs)
        lines.insert(1, f"Networks differ: {each}.")
    if result.device["kind"] == "cpu":
        lines.append("These are CPU figures: the ratios carry over in kind, the absolute values do not.")
        lines.append("Peak memory is the largest resident set of a rank.")
    lines += [str(note) for note in result.settings.get("notes", ())]
    return lines


def ratio(spread: Spread) -> str:
    """A ratio of times: `1.34x (1.31 .. 1.36)`."""
    return f"{spread.median:.3f}x ({spread.p20:.3f} .. {spread.p80:.3f})"


def fallback_lines(result: Comparison) -> Sequence[tuple[str, str, str, str, int]]:
    """Run, module, operation, reason and number of the calls that ran Megatron's own path though the plugin was on."""
    return [
        (run.name, fallback.module, f"{fallback.op} {fallback.direction}", fallback.reason, fallback.calls)
        for run in result.runs
        if run.plugin is not None
        for fallback in run.plugin.fallbacks
    ]


def _spread(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.p20:.{digits}f} .. {spread.p80:.{digits}f})"


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


def _memory(result: Comparison) -> tuple[str, ...]:
    cells = [f"{run.peak_memory_bytes / _MIB:,.0f}" for run in result.runs]
    for index, entry in enumerate(result.against, start=1):
        cells[index] += f" ({entry.memory_ratio:.3f}x)"
    return tuple(cells)


def _calls(run: RunSummary) -> str:
    if run.plugin is None or not run.plugin.active:
        return "plugin off"
    return f"{run.plugin.overlapped_calls:,} ({run.plugin.sent_bytes / _MIB:,.1f} MiB sent)"


def _fallbacks(run: RunSummary) -> str:
    if run.plugin is None or not run.plugin.active:
        return "all"
    return f"{sum(fallback.calls for fallback in run.plugin.fallbacks):,}"
