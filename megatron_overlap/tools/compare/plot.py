"""The picture of a comparison: step times, speedups, and losses."""

import io
from typing import Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from megatron_overlap.tools.compare.comparison import Comparison
from megatron_overlap.tools.launch.run_records import deviation

# Of the runs, distinguishable with colour blindness (Okabe and Ito).
COLORS = ("#5f6b76", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")

_SMALLEST_DEVIATION = 1e-9  # exact agreement has no place on a logarithmic axis; it is drawn at this value
_INK, _GRID = "#24292f", "#d0d7de"
_WIDTH = 13.0  # inches


def draw_overview(result: Comparison, caption: str) -> Any:
    """Step times, speedup of each round, losses and their deviation."""
    figure = make_figure(4.7, caption)
    columns = figure.subfigures(1, 3, width_ratios=(1.15, 0.85, 1.0))
    _step_times(columns[0].subplots(), result)
    _speedups(columns[1].subplots(), result)
    _training(columns[2].subplots(2, 1, sharex=True, height_ratios=(1.25, 1)), result)
    return figure


def _step_times(axes: Any, result: Comparison) -> None:
    keys = "bar and line: median; thick line: p20 to p80; dots: iterations"
    if any(run.exposed is not None for run in result.runs):
        keys += "\ndashed: compute-only floor (step minus exposed communication)"
    style_axes(axes, "Step time, slowest rank (ms)", keys)
    longest = max(max(max(times) for times in run.step_times_ms) for run in result.runs)
    for place, run in enumerate(result.runs):
        color, spread = _color(place), run.step_time_ms
        axes.barh(place, spread.median, height=0.5, color=color, alpha=0.18)
        for number, times in enumerate(run.step_times_ms):
            offset = (number - (len(run.step_times_ms) - 1) / 2) * 0.3 / len(run.step_times_ms)
            axes.plot(times, [place + offset] * len(times), ".", color=color, alpha=0.45, markersize=6, mew=0)
        axes.plot([spread.p20, spread.p80], [place, place], color=color, lw=5, alpha=0.6, solid_capstyle="butt")
        axes.plot([spread.median] * 2, [place - 0.25, place + 0.25], color=color, lw=2.5)
        if run.exposed is not None:
            axes.plot([run.exposed.floor_ms] * 2, [place - 0.25, place + 0.25], color=_INK, lw=1.2, ls="--")
        label = f"{run.name}:  {spread.median:.1f} ms"
        if run.mfu is not None:
            label += f",  MFU {run.mfu:.1%}"
        axes.text(0, place - 0.31, label, fontsize=8.5, color=_INK, va="bottom")
    axes.set_xlim(0, longest * 1.04)
    axes.set_ylim(len(result.runs) - 0.55, -0.65)
    axes.set_yticks([])


def _speedups(axes: Any, result: Comparison) -> None:
    style_axes(axes, "Speedup over the reference", "dots: rounds")
    bars: list[tuple[str, Any, str, list[float]]] = [
        (entry.name, entry.speedup, _color(place), entry.speedup_rounds)
        for place, entry in enumerate(result.against, start=1)
    ]
    if result.attribution is not None:
        parts = result.attribution
        bars = [
            ("faster messages", parts.faster_collective, _color(2), []),
            ("overlap", parts.overlap, _color(3), []),
            ("both", result.headline.speedup, _color(1), result.headline.speedup_rounds),
        ]
    for place, (_, spread, color, each) in enumerate(bars):
        axes.bar(place, spread.median - 1, bottom=1, width=0.5, color=color, alpha=0.25)
        axes.plot([place - 0.25, place + 0.25], [spread.median] * 2, color=color, lw=2.5)
        axes.plot([place] * 2, [spread.p20, spread.p80], color=color, lw=5, alpha=0.6, solid_capstyle="butt")
        for index, value in enumerate(each):
            shift = (index - (len(each) - 1) / 2) * 0.3 / len(each)
            axes.plot(place + shift, value, "o", color=color, markersize=4, mec="white", mew=0.5)
        end, points, aligned = max([spread.p80, *each]), 6, "bottom"
        if spread.median < 1:
            end, points, aligned = min([spread.p20, *each]), -6, "top"
        font = {"fontsize": 10, "fontweight": "bold", "color": _INK, "ha": "center", "va": aligned}
        axes.annotate(f"{spread.median:.3f}x", (place, end), xytext=(0, points), textcoords="offset points", **font)
    axes.axhline(1, color=_INK, lw=1)
    values = [value for _, spread, _, each in bars for value in (spread.p20, spread.p80, *each)]
    low, high = min([1.0, *values]), max([1.0, *values])
    margin = max(0.22 * (high - low), 0.015)
    axes.set_ylim(low - (margin if low < 1 else margin / 3), high + margin)
    axes.set_xlim(-0.6, len(bars) - 0.4)
    axes.set_xticks(range(len(bars)), [_two_lines(name) for name, *_ in bars], fontsize=8.5)


def _training(axes: Any, result: Comparison) -> None:
    losses, deviations = axes
    style_axes(losses, "Loss, and its deviation from the reference")
    style_axes(deviations, "", "iteration")
    reference = result.runs[0]
    for place, run in enumerate(result.runs):
        steps = range(1, len(run.losses) + 1)
        shape = {"lw": 4, "alpha": 0.35} if place == 0 else {"lw": 1.4, "ls": "--" if place > 1 else "-"}
        losses.plot(steps, np.array(run.losses, float), color=_color(place), label=run.name, **shape)
        if place == 0:
            continue
        for kind, marker in (("losses", "o"), ("grad_norms", "^")):
            pairs = zip(getattr(reference, kind), getattr(run, kind), strict=True)
            apart = [max(deviation(a, b), _SMALLEST_DEVIATION) for a, b in pairs]  # NaN stays NaN
            label = ("loss" if kind == "losses" else "grad-norm") if place == 1 else None
            deviations.plot(steps, apart, marker, color=_color(place), markersize=3.5, alpha=0.75, mew=0, label=label)
    losses.legend(fontsize=8, frameon=False)
    deviations.set_yscale("log")
    deviations.minorticks_off()
    deviations.yaxis.set_major_formatter(lambda value, _: "0" if value <= _SMALLEST_DEVIATION else f"{value:.0e}")
    deviations.set_ylabel("relative deviation", fontsize=8)
    deviations.legend(fontsize=8, frameon=False, ncols=2)
    deviations.xaxis.set_major_locator(MaxNLocator(integer=True))


def make_figure(height: float, caption: str) -> Any:
    """A figure of the width of all pictures, and of `height` inches, with a caption below it."""
    figure: Any = Figure(figsize=(_WIDTH, height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.14, h_pad=0.08)
    figure.supxlabel(caption, fontsize=8, color=COLORS[0], x=0.012, ha="left")
    return figure


def as_file(figure: Any, form: Literal["png", "svg"], title: str = "") -> bytes:
    """The content of the file of a figure, with a title above it."""
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", color=_INK, x=0.012, ha="left")
    out = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none"}):  # text stays text: a smaller file
        figure.savefig(out, format=form, facecolor="white")
    return out.getvalue()


def style_axes(axes: Any, title: str, x_label: str = "") -> None:
    """Gives axes their title, label, grid and ticks."""
    axes.set_title(title, fontsize=10, loc="left", color=_INK)
    axes.set_xlabel(x_label, fontsize=8, color=COLORS[0])
    axes.grid(color=_GRID, lw=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=8, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _color(place: int) -> str:
    return COLORS[place % len(COLORS)]


def _two_lines(name: str) -> str:
    """A long name in two lines, split at its middle underscore or dash."""
    breaks = [index for index, letter in enumerate(name) if letter in "_-"]
    if len(name) < 16 or not breaks:
        return name
    middle = min(breaks, key=lambda index: abs(index - len(name) / 2))
    return f"{name[: middle + 1]}\n{name[middle + 1 :]}"
