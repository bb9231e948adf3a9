"""The picture of a comparison: step times, speedup of each round, and whether the runs trained the same."""

from __future__ import annotations

import io
from typing import Any, Literal

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_overlap.tools.compare import text
from megatron_overlap.tools.compare.comparison import Comparison

# Told apart also with colour blindness (Okabe and Ito).
COLORS = ("#5f6b76", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
_SMALLEST_DEVIATION = 1e-9  # exact agreement has no place on a logarithmic axis; it is drawn here
_INK, _GRID = "#24292f", "#d0d7de"


def draw(result: Comparison, form: Literal["png", "svg"] = "png") -> bytes:
    """The picture as a file; an SVG, which is for the report, has no headline of its own."""
    figure: Any = Figure(figsize=(13, 4.9 if form == "png" else 4.5), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.08)
    columns = figure.subfigures(1, 3, width_ratios=(1.15, 0.85, 1.0))
    _step_times(columns[0].subplots(), result)
    _speedups(columns[1].subplots(), result)
    _training(columns[2].subplots(2, 1, sharex=True, height_ratios=(1.25, 1)), result)
    if form == "png":
        figure.suptitle(text.headline(result), fontsize=13, fontweight="bold", color=_INK, x=0.012, ha="left")
    network = str(result.runs[0].link.get("description"))
    where = "read from finished logs" if text.from_logs(result) else f"{text.device(result)}; {network}"
    figure.supxlabel(where, fontsize=8, color=COLORS[0], x=0.012, ha="left")
    out = io.BytesIO()
    figure.savefig(out, format=form, facecolor="white")
    return out.getvalue()


def _step_times(axes: Any, result: Comparison) -> None:
    _style(axes, "Step time, slowest rank (ms)")
    shown = max(max(max(times) for times in run.step_times_ms) for run in result.runs)
    for place, run in enumerate(result.runs):
        color, spread = _color(place), run.step_time_ms
        axes.barh(place, spread.median, height=0.5, color=color, alpha=0.18)
        for number, times in enumerate(run.step_times_ms):
            offset = (number - (len(run.step_times_ms) - 1) / 2) * 0.3 / len(run.step_times_ms)
            axes.plot(times, [place + offset] * len(times), ".", color=color, alpha=0.45, markersize=6, mew=0)
        axes.plot([spread.p20, spread.p80], [place, place], color=color, lw=5, alpha=0.6, solid_capstyle="butt")
        axes.plot([spread.median] * 2, [place - 0.25, place + 0.25], color=color, lw=2.5)
        if run.floor_ms is not None:
            axes.plot([run.floor_ms] * 2, [place - 0.25, place + 0.25], color=_INK, lw=1.2, ls="--")
        label = f"{run.name}:  {spread.median:.1f} ms"
        if run.mfu is not None:
            label += f",  MFU {run.mfu:.1%}"
        axes.text(0, place - 0.31, label, fontsize=8.5, color=_INK, va="bottom")
    axes.set_xlim(0, shown * 1.04)
    axes.set_ylim(len(result.runs) - 0.55, -0.65)
    axes.set_yticks([])
    keys = "bar and line: median; thick line: p20 to p80; dots: iterations"
    if any(run.floor_ms is not None for run in result.runs):
        keys += "\ndashed: compute-only floor, the step less its waits"
    axes.set_xlabel(keys, fontsize=8, color=COLORS[0])


def _speedups(axes: Any, result: Comparison) -> None:
    reference = result.runs[0].name
    _style(axes, f"Speedup over {reference}" if len(reference) < 24 else "Speedup over the reference")
    bars: list[tuple[str, Any, str, list[float]]] = [
        (entry.name, entry.speedup, _color(place), entry.speedup_rounds)
        for place, entry in enumerate(result.against, start=1)
    ]
    if result.attribution is not None:
        parts = result.attribution
        bars = [
            ("faster\ncollective", parts.faster_collective, _color(2), []),
            ("overlap", parts.overlap, _color(3), []),
            ("together", result.headline.speedup, _color(1), result.headline.speedup_rounds),
        ]
    for place, (_, spread, color, each) in enumerate(bars):
        axes.bar(place, spread.median - 1, bottom=1, width=0.5, color=color, alpha=0.25)
        axes.plot([place - 0.25, place + 0.25], [spread.median] * 2, color=color, lw=2.5)
        axes.plot([place] * 2, [spread.p20, spread.p80], color=color, lw=5, alpha=0.6, solid_capstyle="butt")
        for index, value in enumerate(each):
            shift = (index - (len(each) - 1) / 2) * 0.3 / max(len(each), 1)
            axes.plot(place + shift, value, "o", color=color, markersize=4, mec="white", mew=0.5)
        above = spread.median >= 1
        highest, lowest = max([spread.p80, *each]), min([spread.p20, *each])
        axes.annotate(
            f"{spread.median:.3f}x",
            (place, highest if above else lowest),
            xytext=(0, 6 if above else -6),
            textcoords="offset points",
            ha="center",
            va="bottom" if above else "top",
            fontsize=10,
            fontweight="bold",
            color=_INK,
        )
    axes.axhline(1, color=_INK, lw=1)
    values = [value for _, spread, _, each in bars for value in (spread.p20, spread.p80, *each)]
    low, high = min([1.0, *values]), max([1.0, *values])
    margin = max(0.22 * (high - low), 0.015)
    axes.set_ylim(low - (margin if low < 1 else margin / 3), high + margin)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [_fold(name) for name, *_ in bars], fontsize=8.5)
    axes.set_xlabel("dots: rounds", fontsize=8, color=COLORS[0])


def _training(axes: Any, result: Comparison) -> None:
    losses, deviations = axes
    _style(losses, "Loss, and how far it is from the reference")
    _style(deviations, "")
    reference = result.runs[0]
    for place, run in enumerate(result.runs):
        steps = range(1, len(run.losses) + 1)
        shape = {"lw": 4, "alpha": 0.35} if place == 0 else {"lw": 1.4, "ls": "--" if place > 1 else "-"}
        losses.plot(steps, [_or_gap(value) for value in run.losses], color=_color(place), label=run.name, **shape)
        if place == 0:
            continue
        for kind, marker in (("losses", "o"), ("grad_norms", "^")):
            apart = [_apart(a, b) for a, b in zip(getattr(reference, kind), getattr(run, kind), strict=True)]
            label = ("loss" if kind == "losses" else "grad-norm") if place == 1 else None
            deviations.plot(steps, apart, marker, color=_color(place), markersize=3.5, alpha=0.75, mew=0, label=label)
    losses.legend(fontsize=8, frameon=False)
    deviations.set_yscale("log")
    deviations.minorticks_off()
    deviations.yaxis.set_major_formatter(lambda value, _: "0" if value <= _SMALLEST_DEVIATION else f"{value:.0e}")
    deviations.set_ylabel("relative deviation", fontsize=8)
    deviations.legend(fontsize=8, frameon=False, ncols=2)
    deviations.set_xlabel("iteration", fontsize=8, color=COLORS[0])
    deviations.xaxis.set_major_locator(MaxNLocator(integer=True))


def _style(axes: Any, title: str) -> None:
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.grid(color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _fold(name: str) -> str:
    """A long name over two lines, at its middle underscore or dash."""
    breaks = [index for index, letter in enumerate(name) if letter in "_-"]
    if len(name) < 16 or not breaks:
        return name
    middle = min(breaks, key=lambda index: abs(index - len(name) / 2))
    return f"{name[: middle + 1]}\n{name[middle + 1 :]}"


def _or_gap(value: float | None) -> float:
    return float("nan") if value is None else value


def _apart(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return float("nan")
    return max(abs(b - a) / abs(a) if a else abs(b - a), _SMALLEST_DEVIATION)
