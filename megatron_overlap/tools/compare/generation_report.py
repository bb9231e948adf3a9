"""Table, page and picture of a comparison of generation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.generation import METRICS, GenerationComparison, WorkloadSummary
from megatron_overlap.tools.compare.plot import COLORS, make_figure, style_axes


def draw_generation(result: GenerationComparison, caption: str) -> Any:
    """The first token by prompt length with the largest batch; the other figures by batch with the longest prompts."""
    figure = make_figure(4.0, caption)
    workloads = result.runs[0].workloads
    batch, length = max(each.batch for each in workloads), max(each.prompt_tokens for each in workloads)
    for axes, (name, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        if name == "first_token_ms":
            axes_title, x_label = f"{label}: batch {batch}", "tokens of a prompt"
            ticks = {place: each.prompt_tokens for place, each in enumerate(workloads) if each.batch == batch}
        else:
            axes_title, x_label = f"{label}: prompts of {length:,} tokens", "batch"
            ticks = {place: each.batch for place, each in enumerate(workloads) if each.prompt_tokens == length}
        style_axes(axes, axes_title, x_label)
        _bars(axes, result, name, ticks)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), fontsize=8.5, frameon=False)
    return figure


def _bars(axes: Any, result: GenerationComparison, name: str, ticks: Mapping[int, int]) -> None:
    """One bar for each run and workload; `ticks` has the places of the workloads and their labels."""
    width = 0.8 / len(result.runs)
    for number, run in enumerate(result.runs):
        color = COLORS[number % len(COLORS)]
        at = [index + (number - (len(result.runs) - 1) / 2) * width for index in range(len(ticks))]
        shown = [run.workloads[place] for place in ticks]
        spreads = [each.figures[name] for each in shown]
        axes.bar(at, [each.median for each in spreads], width=0.9 * width, color=color, alpha=0.55, label=run.name)
        axes.vlines(at, [each.p20 for each in spreads], [each.p80 for each in spreads], color=color, lw=3)
        for x, each, spread in zip(at, shown, spreads, strict=True):
            if name in each.speedups:
                text = f"{each.speedups[name].median:.2f}x"
                axes.text(x, spread.p80, text, fontsize=8, ha="center", va="bottom")
    axes.set_xticks(range(len(ticks)), [f"{tick:,}" for tick in ticks.values()], fontsize=8.5)
    axes.margins(y=0.12)


def write(result: GenerationComparison, folder: Path, configs: Mapping[str, str]) -> None:
    """Publish the comparison, as `report.publish` does."""
    page = {
        "headline": headline(result),
        "rows": rows(result),
        "notes": [*report.measured_on(result), *map(str, result.settings["notes"])],
    }
    figures = {"generation": True, **vars(result)}
    report.publish(result, folder, configs, draw_generation, figures, "generation.html.j2", page)


def headline(result: GenerationComparison) -> str:
    """The second run against the reference in one sentence: the longest prompts with the largest batch."""
    reference, run = result.runs[0], result.runs[1]
    last = run.workloads[-1]
    first_token, decode = (last.speedups[name].median for name in ("first_token_ms", "decode_ms"))
    return (
        f"{run.name}: first token {first_token:.3f}x, decode {decode:.3f}x over {reference.name} at "
        f"{last.label}; tokens {'equal' if run.tokens_equal else 'differ'}"
    )


def rows(result: GenerationComparison) -> list[report.Row]:
    """The rows of the table: every figure by workload, then tokens and calls."""
    runs, workloads = result.runs, result.runs[0].workloads
    shown = [report.Row("engine", tuple(run.engine for run in runs))]
    for name, label in METRICS.items():
        for place, workload in enumerate(workloads):
            mine = [run.workloads[place] for run in runs]
            medians = tuple(f"{each.figures[name].median:,.1f}" for each in mine)
            shown.append(report.Row(f"{label}: {workload.label}", medians))
            speedups = (report.ratio(each.speedups[name]) for each in mine[1:])
            shown.append(report.Row("relative to the reference", ("reference", *speedups), detail=True))
    for place, workload in enumerate(workloads):
        tokens = (_tokens(run.workloads[place]) for run in runs[1:])
        shown.append(report.Row(f"equal sequences: {workload.label}", ("reference", *tokens)))
    return [*shown, *report.call_rows(runs)]


def _tokens(summary: WorkloadSummary) -> str:
    text = f"{summary.equal_sequences} of {summary.sequences}"
    place = summary.first_difference
    return text if place is None else f"{text}; first difference at token {place + 1}"
