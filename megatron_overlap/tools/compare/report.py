"""Writes a comparison: a table for the terminal, compare.json, compare.png and compare.html."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from rich import box
from rich.table import Table

from megatron_overlap.tools.compare import text
from megatron_overlap.tools.compare.breakdown import waterfalls
from megatron_overlap.tools.compare.comparison import Comparison
from megatron_overlap.tools.compare.comparison_json import comparison_content
from megatron_overlap.tools.compare.timeline_drawing import BAR, FILLS, LEFT, MESSAGES, WIDTH, Drawing, draw_timelines
from megatron_overlap.tools.trace.timeline import timelines

JSON_FILE, PNG_FILE, HTML_FILE = "compare.json", "compare.png", "compare.html"
RUNS_FOLDER = "runs"


def table(result: Comparison) -> Table:
    """The figures for a rich console, one column a run."""
    shown = Table("", box=box.SIMPLE_HEAD)
    for run in result.runs:
        shown.add_column(run.name, justify="right", overflow="fold")
    for row in text.rows(result):
        shown.add_row(row.label, *row.cells)
    return shown


def html(result: Comparison, plot: bytes, configs: Mapping[str, str], runs_folder: Path) -> str:
    """The report as one page that needs nothing else, neither files nor a network nor scripts.

    Args:
        result: the comparison.
        plot: an SVG.
        configs: the resolved config of each run, by its name.
        runs_folder: where the launches wrote, and the events of the timelines are.
    """
    folder = PackageLoader("megatron_overlap.tools.compare")
    environment = Environment(loader=folder, autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["breakable"] = _breakable
    falls = waterfalls(result)
    drawing, timeline_notes = _timelines(result, runs_folder)
    return environment.get_template("compare.html.j2").render(
        headline=text.headline(result),
        attribution=text.attribution(result),
        key_figures=text.key_figures(result),
        plot=base64.b64encode(plot).decode("ascii"),
        drawing=drawing,
        timeline_notes=timeline_notes,
        fills=FILLS,
        width=WIDTH,
        left=LEFT,
        bar=BAR,
        message_height=MESSAGES,
        falls=falls,
        roof=text.roof,
        ms=partial(_ms, form=",.1f"),
        signed=partial(_ms, form="+,.1f"),
        runs=result.runs,
        rows=text.rows(result),
        notes=text.notes(result),
        from_logs=text.from_logs(result),
        # The waterfalls have these figures too.
        exposed=() if falls else text.exposed_bars(result),
        fallbacks=text.fallback_lines(result),
        configs=configs,
    )


def _ms(value: float, form: str) -> str:
    return f"{round(value, 1) + 0.0:{form}}".replace("-", "\u2212")  # + 0.0: no minus zero


def _breakable(text: str) -> Markup:
    """A name that may go over lines, where its words end."""
    return Markup("<wbr>").join(re.split(r"(?<=[_.\-])(?=\w)|(?<=[a-z])(?=[A-Z])", text))


def _timelines(result: Comparison, runs_folder: Path) -> tuple[Drawing | None, list[str]]:
    """The drawing of a step of each run, None where no run has events, and what is to be said of it."""
    if all(run.exposed is None for run in result.runs):
        return None, [text.NO_EVENTS]
    found, missing = timelines(result, runs_folder)
    if not found:
        return None, missing
    return draw_timelines(found), [*text.timeline_notes(found), *missing]


def write(result: Comparison, folder: Path, configs: Mapping[str, str]) -> None:
    """Write the three files: all made before the first is put in place, the JSON last.

    Args:
        result: the comparison.
        folder: where to; events of the launches are looked for in its `RUNS_FOLDER`.
        configs: the resolved config of each run, by its name.
    """
    from megatron_overlap.tools.compare.plot import draw

    content = {
        PNG_FILE: draw(result),
        HTML_FILE: html(result, draw(result, form="svg"), configs, folder / RUNS_FOLDER).encode(),
        JSON_FILE: (json.dumps(_finite(comparison_content(result)), indent=1, allow_nan=False) + "\n").encode(),
    }
    for name, data in content.items():
        (folder / f"{name}.new").write_bytes(data)
    for name in content:
        (folder / f"{name}.new").replace(folder / name)


def remove(folder: Path) -> None:
    """Take away what an earlier comparison wrote here, so that it is not taken for the result of this one."""
    for name in (JSON_FILE, HTML_FILE, PNG_FILE):
        (folder / name).unlink(missing_ok=True)


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN, which a diverging run may well log: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value
