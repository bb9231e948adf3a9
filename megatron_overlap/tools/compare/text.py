"""How the figures of a comparison are written for people: in the terminal's table and in the report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megatron_overlap.tools.compare.breakdown import Waterfall, op_label
from megatron_overlap.tools.compare.comparison import Comparison, RunSummary
from megatron_overlap.tools.compare.stats import Spread
from megatron_overlap.tools.trace.timeline import Timeline

NO_EVENTS = (
    "No timeline: these runs recorded no events. `megatron-overlap compare CONFIG overlap.trace=true` records and "
    "draws them."
)

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One line of the table: what it is, a cell for each run, and whether it says more of the line above."""

    label: str
    cells: tuple[str, ...]
    more: bool = False


def headline(result: Comparison) -> str:
    """The result in one sentence."""
    first = result.headline
    rounds = len(first.speedup_rounds)
    return f"{first.name} is {ratio(first.speedup)} as fast as {result.runs[0].name}, over {rounds} " + (
        "rounds" if rounds > 1 else "round"
    )


@dataclass(frozen=True)
class KeyFigure:
    """What a reader wants first of the second run and the reference: a name, a value, and what belongs to it."""

    label: str
    value: str
    more: str


def key_figures(result: Comparison) -> list[KeyFigure]:
    """The figures at the head of the report, as far as they are known."""
    before, after, first = result.runs[0], result.runs[1], result.headline
    rounds = len(first.speedup_rounds)
    found = [
        KeyFigure(
            "speedup",
            f"{first.speedup.median:.3f}x",
            f"{_range(first.speedup, 3)}, {rounds} round{'s' if rounds > 1 else ''}",
        ),
        KeyFigure("step time, ms", _arrow(before.step_time_ms.median, after.step_time_ms.median, "{:,.1f}"), "medians"),
    ]
    if before.exposed is not None and after.exposed is not None:
        share = _arrow(before.exposed.share, after.exposed.share, "{:.1%}")
        times = _arrow(before.exposed.step_ms.median, after.exposed.step_ms.median, "{:,.1f}")
        found.append(KeyFigure("exposed communication, ms", times, f"{share} of the step"))
    if before.mfu is not None and after.mfu is not None:
        found.append(
            KeyFigure("MFU", _arrow(before.mfu, after.mfu, "{:.1%}"), f"of {after.peak_tflops:.4g} TFLOP/s per device")
        )
    if first.max_loss_deviation is not None:
        own = before.own_loss_deviation
        more = "largest, relative" if own is None else f"the reference's own rounds: {_deviation(own)}"
        found.append(KeyFigure("loss deviation", _deviation(first.max_loss_deviation), more))
    return found


def roof(fall: Waterfall) -> str:
    """How far the two runs of a waterfall are from what a perfect overlap of the same computation would take."""
    floor = fall.reference_floor_ms
    return (
        f"Roof: without any exposed communication a step of {fall.reference} would be its computation alone, "
        f"{floor:,.1f} ms (compute-only floor: its step less all its waits). It takes {fall.reference_ms / floor:.2f} "
        f"times that, {fall.run} {fall.run_ms / floor:.2f} times."
    )


def timeline_notes(found: Sequence[Timeline]) -> list[str]:
    """What a reader needs to know of the drawn steps."""
    lines = [
        "Of each run the timed step whose time is nearest its median, all from their own zero, by the events of its "
        "ranks. Grey is the step less its waits. Messages are those of overlapped ops, from sent to landed; of "
        "Megatron's own collectives the waits alone are known."
    ]
    errors = [one.clock_error_ns for one in found]
    known = [error for error in errors if error is not None]
    if len(known) == len(errors):
        lines.append(f"All ranks of a run are on one clock, to {max(known) / 1e3:,.0f} us or better.")
    else:
        names = ", ".join(one.run for one in found if one.clock_error_ns is None)
        lines.append(f"Clocks of ranks were not compared, and are taken as equal: {names}.")
    if any(len(one.lanes) < one.num_ranks for one in found):
        lines.append("Not all ranks are drawn: the first, the one with the longest step, the one that waited most.")
    return lines


def attribution(result: Comparison) -> str | None:
    """What the speedup is made of, None where it was not taken apart."""
    parts = result.attribution
    if parts is None:
        return None
    return f"of it: faster collective: {ratio(parts.faster_collective)}, overlap: {ratio(parts.overlap)}"


def rows(result: Comparison) -> list[Row]:
    """The table, one column a run."""
    runs, others = result.runs, result.against

    def against(cells: Iterable[str]) -> tuple[str, ...]:
        return ("reference", *cells)

    table = [
        Row("step time, ms: median", tuple(f"{run.step_time_ms.median:.1f}" for run in runs)),
        Row("p20 .. p80", tuple(_range(run.step_time_ms, 1) for run in runs), more=True),
        Row("speedup: median", against(f"{other.speedup.median:.3f}x" for other in others)),
        Row("p20 .. p80", against(_range(other.speedup, 3) for other in others), more=True),
        Row("tokens/s", tuple(_number(run.tokens_per_s, "{:,.0f}") for run in runs)),
        Row("tokens/s per device", tuple(_number(run.tokens_per_s_per_device, "{:,.0f}") for run in runs)),
        Row("TFLOP/s per device", tuple(_number(run.tflops_per_device, "{:.4g}") for run in runs)),
        Row("peak TFLOP/s per device", tuple(_number(run.peak_tflops, "{:.4g}") for run in runs)),
        Row("MFU", tuple(_number(run.mfu, "{:.1%}") for run in runs)),
        Row("peak memory, MiB", tuple(_mib(run.peak_memory_bytes) for run in runs)),
        Row("against the reference", against(_number(other.memory_ratio, "{:.3f}x") for other in others), more=True),
        Row("loss deviation", against(_deviation(other.max_loss_deviation) for other in others)),
        Row("grad-norm deviation", against(_deviation(other.max_grad_norm_deviation) for other in others)),
        Row("loss, its own rounds", tuple(_deviation(run.own_loss_deviation) for run in runs)),
        Row("grad-norm, its own rounds", tuple(_deviation(run.own_grad_norm_deviation) for run in runs)),
    ]
    if any(run.exposed is not None for run in runs):
        exposed = [run.exposed for run in runs]
        table += [
            Row(
                "exposed communication, ms",
                tuple(_number(None if one is None else one.step_ms.median, "{:.1f}") for one in exposed),
            ),
            Row("p20 .. p80", tuple("-" if one is None else _range(one.step_ms, 1) for one in exposed), more=True),
            Row(
                "of the step",
                tuple(_number(None if one is None else one.share, "{:.1%}") for one in exposed),
                more=True,
            ),
            Row("compute-only floor, ms", tuple(_number(run.floor_ms, "{:.1f}") for run in runs)),
        ]
    if from_logs(result):  # a log says little, and nothing of what the plugin did: no row without a figure
        return [row for row in table if set(row.cells) - {"not known", "reference"}]
    return [
        *table,
        Row("overlapped calls", tuple(_calls(run) for run in runs)),
        Row("sent in them, MiB", tuple(_sent(run) for run in runs)),
        Row("calls left to Megatron", tuple(_fallbacks(run) for run in runs)),
    ]


@dataclass(frozen=True)
class Bar:
    """One op in the picture of what is exposed: its name, and of each run the text and the length, 0 to 100."""

    label: str
    cells: tuple[tuple[str, float], ...]


def exposed_bars(result: Comparison) -> list[Bar]:
    """Exposed time a step by op and direction, one column a run; empty where no run recorded events."""
    recorded = [run.exposed.by_op if run.exposed is not None else None for run in result.runs]
    keys: dict[tuple[str, str], float] = {}
    for by_op in recorded:
        for key, time_ms in (by_op or {}).items():
            keys[key] = max(keys.get(key, 0.0), time_ms)
    longest = max(keys.values(), default=0.0) or 1.0
    bars = []
    for key in sorted(keys, key=lambda key: (-keys[key], key)):
        times = [None if by_op is None else by_op.get(key, 0.0) for by_op in recorded]
        cells = tuple((_number(time, "{:.2f} ms"), 100 * (time or 0.0) / longest) for time in times)
        bars.append(Bar(op_label(key), cells))
    return bars


def from_logs(result: Comparison) -> bool:
    """Whether finished logs were read, and nothing was launched."""
    return result.settings.get("source") == "logs"


def notes(result: Comparison) -> list[str]:
    """What a reader needs to know to believe the figures, one sentence each."""
    first = result.runs[0]
    lines = [
        f"Device: {device(result)}.",
        f"Peak: {first.peak_source}.",
        f"FLOPs: {first.flops_convention}.",
    ]
    if result.versions:
        versions = (f"{name} {version}" for name, version in result.versions.items() if version)
        lines.append("Versions: " + ", ".join(versions) + ".")
    links = list(dict.fromkeys(str(run.link.get("description")) for run in result.runs))
    if len(links) == 1:
        lines.insert(1, f"Network: {links[0]}.")
    else:
        each = "; ".join(f"{run.name}: {run.link.get('description')}" for run in result.runs)
        lines.insert(1, f"Networks differ: {each}.")
    if result.device["kind"] == "cpu":
        lines.append("These are CPU figures: the ratios carry over in kind, the absolute values do not.")
        lines.append(
            "Peak memory is the largest resident set of a rank in any round; against the reference: median of rounds."
        )
    if any(run.exposed is not None for run in result.runs):
        lines.append(
            "Exposed communication: time in which a rank computed nothing because it waited for a message, the mean "
            "over ranks; by our own events, Megatron's collectives included on CPU."
        )
    lines += [
        f"{run.name}: {calls:,} calls were to run fused and ran p2p: {reason}."
        for run in result.runs
        if run.plugin is not None
        for reason, calls in run.plugin.not_fused.items()
    ]
    lines += [str(note) for note in result.settings.get("notes", ())]
    return lines


def device(result: Comparison) -> str:
    """What it ran on: `2 ranks on x86_64 (cpu)`."""
    found = result.device
    kind = f" ({found['kind']})" if found["kind"] else ""
    return f"{found['world_size']} ranks on {found['name']}{kind}" if not from_logs(result) else str(found["name"])


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


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.p20:.{digits}f} .. {spread.p80:.{digits}f}"


def _arrow(before: float, after: float, form: str) -> str:
    return f"{form.format(before)} \u2192 {form.format(after)}"


def _number(value: float | None, form: str) -> str:
    return "not known" if value is None else form.format(value)


def _deviation(value: float | None) -> str:
    return "0" if value == 0 else _number(value, "{:.1e}")


def _mib(value: int | None) -> str:
    return "not known" if value is None else f"{value / _MIB:,.0f}"


def _calls(run: RunSummary) -> str:
    return f"{run.plugin.overlapped_calls:,}" if run.plugin is not None and run.plugin.active else "plugin off"


def _sent(run: RunSummary) -> str:
    return f"{run.plugin.sent_bytes / _MIB:,.1f}" if run.plugin is not None and run.plugin.active else "-"


def _fallbacks(run: RunSummary) -> str:
    if run.plugin is None or not run.plugin.active:
        return "all"
    return f"{sum(fallback.calls for fallback in run.plugin.fallbacks):,}"
