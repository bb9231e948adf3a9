"""Publishes a comparison: the table on the terminal, compare.json, compare.png and compare.html."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic_core import to_json
from rich import box
from rich.console import Console
from rich.table import Column, Table

from megatron_overlap.tools.compare.breakdown import breakdowns
from megatron_overlap.tools.compare.comparison import Compared, Comparison, RunSummary, Spread, comparison_content
from megatron_overlap.tools.compare.generation import GenerationRun
from megatron_overlap.tools.compare.plot import as_file, draw_overview
from megatron_overlap.tools.compare.rounds import run_folder

JSON_FILE, PNG_FILE, HTML_FILE = "compare.json", "compare.png", "compare.html"
RUNS_FOLDER = "runs"

_MIB = 1024 * 1024


@dataclass(frozen=True)
class Row:
    """One row of the table: a label and a cell for each run. `detail`: the row adds to the row above it."""

    label: str
    cells: tuple[str, ...]
    detail: bool = False


def write(result: Comparison, folder: Path, configs: Mapping[str, str]) -> None:
    """Publish the comparison of runs that train, as `publish` does. `RUNS_FOLDER` in `folder` has the events."""
    page = {
        "headline": headline(result),
        "attribution": attribution(result),
        "rows": rows(result),
        "notes": notes(result),
        "steps": [(run, run_folder(folder / RUNS_FOLDER, run.typical_step.round, run.name)) for run in result.runs],
        "breakdowns": breakdowns(result),
        "ms": partial(_ms, form=",.1f"),
        "signed": partial(_ms, form="+,.1f"),
    }
    publish(result, folder, configs, draw_overview, comparison_content(result), "compare.html.j2", page)


def publish(
    result: Compared[Any],
    folder: Path,
    configs: Mapping[str, str],
    draw: Callable[[Any, str], Any],
    figures: Mapping[str, Any],
    template: str,
    page: Mapping[str, Any],
) -> None:
    """Write three complete files, the JSON last, and print the figures. The page needs no scripts or other files.

    `configs` has the resolved config of each run by its name. `draw` draws the overview of the result with a caption.
    `figures` is the content of the JSON file (infinity and NaN become null), `page` that of the template.
    """
    logs = from_logs(result)
    measured = f"{ranks_and_device(result.device)}; {result.runs[0].link.get('description')}"
    figure = draw(result, "read from finished logs" if logs else measured)
    fallbacks = [
        (run.name, fallback.module, f"{fallback.op} {fallback.direction}", fallback.reason, fallback.calls)
        for run in result.runs
        if run.plugin is not None
        for fallback in run.plugin.fallbacks
    ]
    common = {"runs": result.runs, "configs": configs, "fallbacks": None if logs else fallbacks}
    loader = PackageLoader("megatron_overlap.tools.compare")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    overview = f"data:image/svg+xml;base64,{base64.b64encode(as_file(figure, 'svg')).decode('ascii')}"
    html = environment.get_template(template).render(overview=overview, **common, **page)
    figures_json = to_json(figures, indent=1, inf_nan_mode="null") + b"\n"
    png = as_file(figure, "png", title=page["headline"])
    content = {PNG_FILE: png, HTML_FILE: html.encode(), JSON_FILE: figures_json}
    for name, data in content.items():
        (folder / f"{name}.new").write_bytes(data)
    for name in content:
        (folder / f"{name}.new").replace(folder / name)
    table = Table("", *(Column(run.name, justify="right", overflow="fold") for run in result.runs), box=box.SIMPLE_HEAD)
    for row in page["rows"]:
        table.add_row(f"  {row.label}" if row.detail else row.label, *row.cells)
    console = Console()
    console.print(table)
    for line in page["notes"]:
        console.print(f"- {line}", style="dim", highlight=False, soft_wrap=True)
    for name, module, operation, reason, calls in fallbacks:
        console.print(f"- {name}: {module}: {operation}: {calls} calls on the stock path: {reason}", highlight=False)
    console.print()
    for line in filter(None, (page["headline"], page.get("attribution"))):
        console.print(line, style="bold", highlight=False, soft_wrap=True)
    console.print(f"{folder}: {JSON_FILE}, {PNG_FILE}, {HTML_FILE}", highlight=False, soft_wrap=True)


def headline(result: Comparison) -> str:
    """The result in one sentence."""
    first, rounds = result.headline, len(result.headline.speedup_rounds)
    text = f"{first.name}: speedup {ratio(first.speedup)} over {result.runs[0].name}"
    return f"{text}, {rounds} round{'s' if rounds > 1 else ''}"


def attribution(result: Comparison) -> str | None:
    """The two factors of the speedup; None without the serial run."""
    if (parts := result.attribution) is None:
        return None
    return f"Attribution: faster messages {ratio(parts.faster_collective)}, overlap {ratio(parts.overlap)}"


def rows(result: Comparison) -> list[Row]:
    """The rows of the table."""
    runs, others = result.runs, result.against

    def against(cells: Iterable[str]) -> tuple[str, ...]:
        return ("reference", *cells)

    shown = [
        Row("step time, ms: median", tuple(f"{run.step_time_ms.median:.1f}" for run in runs)),
        Row("p20 to p80", tuple(_range(run.step_time_ms, 1) for run in runs), detail=True),
        Row("speedup: median", against(f"{other.speedup.median:.3f}x" for other in others)),
        Row("p20 to p80", against(_range(other.speedup, 3) for other in others), detail=True),
        Row("tokens/s", tuple(_number(run.tokens_per_s, "{:,.0f}") for run in runs)),
        Row("tokens/s per device", tuple(_number(run.tokens_per_s_per_device, "{:,.0f}") for run in runs)),
        Row("TFLOP/s per device", tuple(_number(run.tflops_per_device, "{:.4g}") for run in runs)),
        Row("peak TFLOP/s per device", tuple(_number(run.peak_tflops, "{:.4g}") for run in runs)),
        Row("MFU", tuple(_number(run.mfu, "{:.1%}") for run in runs)),
        Row("peak memory, MiB", tuple(_number(run.peak_memory_bytes, "{:,.0f}", _MIB) for run in runs)),
        Row("relative to the reference", against(_number(other.memory_ratio, "{:.3f}x") for other in others), True),
        Row("loss deviation", against(_deviation(other.max_loss_deviation) for other in others)),
        Row("between rounds of the run", tuple(_deviation(run.own_loss_deviation) for run in runs), True),
        Row("grad-norm deviation", against(_deviation(other.max_grad_norm_deviation) for other in others)),
        Row("between rounds of the run", tuple(_deviation(run.own_grad_norm_deviation) for run in runs), True),
    ]
    evaluations = [run.evaluation_ms for run in runs]
    if any(evaluations):
        speedups = (other.evaluation_speedup for other in others)
        shown += [
            Row("evaluation, ms", tuple(f"{each.median:.1f}" if each else "unknown" for each in evaluations)),
            Row("speedup", against(ratio(each) if each else "unknown" for each in speedups), detail=True),
        ]
    waits = [run.exposed for run in runs]
    if any(waits):
        shown += [
            Row("exposed communication, ms", tuple(f"{one.step_ms.median:.1f}" if one else "unknown" for one in waits)),
            Row("p20 to p80", tuple(_range(one.step_ms, 1) if one else "-" for one in waits), detail=True),
            Row("share of the step", tuple(f"{one.share_of_step:.1%}" if one else "unknown" for one in waits), True),
            Row("compute-only floor, ms", tuple(f"{one.floor_ms:.1f}" if one else "unknown" for one in waits)),
        ]
    if from_logs(result):  # a log knows few of the figures: rows without a figure are left out
        return [row for row in shown if set(row.cells) - {"unknown", "reference"}]
    return [*shown, *call_rows(runs)]


def call_rows(runs: Sequence[RunSummary | GenerationRun]) -> list[Row]:
    """The rows of the plugin's report."""
    columns = []
    for run in runs:
        cells = ("plugin off", "-", "all")
        if run.plugin is not None and run.plugin.active:
            stock = sum(fallback.calls for fallback in run.plugin.fallbacks)
            cells = (f"{run.plugin.overlapped_calls:,}", f"{run.plugin.sent_bytes / _MIB:,.1f}", f"{stock:,}")
        columns.append(cells)
    labels = ("overlapped calls", "sent by overlapped calls, MiB", "calls on the stock path")
    return list(map(Row, labels, zip(*columns, strict=True)))


def notes(result: Comparison) -> list[str]:
    """How the figures were measured, one sentence each."""
    first = result.runs[0]
    lines = measured_on(result, f"Peak: {first.peak_source}.", f"FLOPs: {first.flops_convention}.")
    if result.device["kind"] == "cpu":
        lines.append(
            "Peak memory: the largest resident set of a rank in any round. Relative to the reference: median of rounds."
        )
    if any(run.exposed is not None for run in result.runs):
        lines.append(
            "Exposed communication: time in which a rank waited for a message and computed nothing, mean over ranks. "
            "On CPU it includes the collective wait time of Megatron."
        )
    lines += [
        f"{run.name}: {calls:,} calls with method fused ran p2p: {reason}."
        for run in result.runs
        if run.plugin is not None
        for reason, calls in run.plugin.not_fused.items()
    ]
    return [*lines, *(str(note) for note in result.settings.get("notes", ()))]


def measured_on(result: Compared[Any], *figures: str) -> list[str]:
    """Device, network, `figures` and the known versions, one sentence each."""
    links = list(dict.fromkeys(str(run.link.get("description")) for run in result.runs))
    each = "; ".join(f"{run.name}: {run.link.get('description')}" for run in result.runs)
    lines = [
        f"Device: {result.device['name'] if from_logs(result) else ranks_and_device(result.device)}.",
        f"Network: {links[0]}." if len(links) == 1 else f"The networks differ: {each}.",
        *figures,
    ]
    if versions := [f"{name} {version}" for name, version in result.versions.items() if version]:
        lines.append(f"Versions: {', '.join(versions)}.")
    if result.device["kind"] == "cpu":
        lines.append("Measured on CPU: the absolute values do not carry over to a GPU.")
    return lines


def from_logs(result: Compared[Any]) -> bool:
    return result.settings.get("source") == "logs"


def ranks_and_device(found: Mapping[str, Any]) -> str:
    """`2 ranks on x86_64 (cpu)`."""
    kind = f" ({found['kind']})" if found["kind"] else ""
    return f"{found['world_size']} ranks on {found['name']}{kind}"


def ratio(spread: Spread) -> str:
    """A ratio of times: `1.340x (1.310 to 1.360)`."""
    return f"{spread.median:.3f}x ({_range(spread, 3)})"


def _ms(value: float, form: str) -> str:
    return f"{round(value, 1) + 0.0:{form}}".replace("-", "\u2212")  # adding 0.0 turns minus zero into zero


def _range(spread: Spread, digits: int) -> str:
    return f"{spread.p20:.{digits}f} to {spread.p80:.{digits}f}"


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return "unknown" if value is None else form.format(value / unit)


def _deviation(value: float | None) -> str:
    return "0" if value == 0 else _number(value, "{:.1e}")
