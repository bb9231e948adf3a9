"""The picture of a comparison of generation: time to the first token, time of a token, and throughput."""

from typing import Any, Literal

from megatron_overlap.tools.compare.generation import METRICS, GenerationComparison, Workload
from megatron_overlap.tools.compare.plot import COLORS, as_file, make_figure, style_axes, title_and_caption


def draw_generation(result: GenerationComparison, form: Literal["png", "svg"], caption: str, title: str = "") -> bytes:
    """The first token by prompt length with the largest batch; the other figures by batch with the longest prompts."""
    figure = make_figure(4.2 if title else 3.8)
    workloads = [each.workload for each in result.runs[0].workloads]
    batch, length = max(each.batch for each in workloads), max(each.prompt_tokens for each in workloads)
    by_length = [place for place, each in enumerate(workloads) if each.batch == batch]
    by_batch = [place for place, each in enumerate(workloads) if each.prompt_tokens == length]
    for axes, (name, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        first = name == "first_token_ms"
        style_axes(axes, f"{label}: batch {batch}" if first else f"{label}: prompts of {length:,} tokens")
        _bars(axes, result, name, by_length if first else by_batch, "prompt_tokens" if first else "batch")
        axes.set_xlabel("tokens of a prompt" if first else "batch", fontsize=8, color=COLORS[0])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower right", ncols=len(labels), fontsize=8.5, frameon=False)
    title_and_caption(figure, title, caption)
    return as_file(figure, form)


def _bars(axes: Any, result: GenerationComparison, name: str, places: list[int], key: str) -> None:
    width = 0.8 / len(result.runs)
    shown: list[Workload] = [result.runs[0].workloads[place].workload for place in places]
    for number, run in enumerate(result.runs):
        color = COLORS[number % len(COLORS)]
        at = [index + (number - (len(result.runs) - 1) / 2) * width for index in range(len(places))]
        spreads = [run.workloads[place].figures[name] for place in places]
        axes.bar(at, [each.median for each in spreads], width=0.9 * width, color=color, alpha=0.55, label=run.name)
        axes.vlines(at, [each.p20 for each in spreads], [each.p80 for each in spreads], color=color, lw=3)
        for x, place, spread in zip(at, places, spreads, strict=True):
            speedup = run.workloads[place].speedups.get(name)
            if speedup is not None:
                axes.text(x, spread.p80, f"{speedup.median:.2f}x", fontsize=8, ha="center", va="bottom")
    axes.set_xticks(range(len(places)), [f"{getattr(each, key):,}" for each in shown], fontsize=8.5)
    axes.margins(y=0.12)
