"""Writes a comparison: a table for the terminal, compare.json, compare.png and compare.html."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich import box
from rich.table import Table

from megatron_overlap.measure import wording
from megatron_overlap.measure.compare import Comparison

JSON_FILE, PNG_FILE, HTML_FILE = "compare.json", "compare.png", "compare.html"


def table(result: Comparison) -> Table:
    """The figures for a rich console, one column a run."""
    shown = Table("", box=box.SIMPLE_HEAD)
    for run in result.runs:
        shown.add_column(run.name, justify="right", overflow="fold")
    for row in wording.rows(result):
        shown.add_row(row.label, *row.cells)
    return shown


def html(result: Comparison, picture: bytes, configs: Mapping[str, str]) -> str:
    """The report as one page that needs nothing else, neither files nor a network.

    Args:
        result: the comparison.
        picture: a PNG.
        configs: the resolved config of each run, by its name.
    """
    template = resources.files("megatron_overlap.measure").joinpath("templates/compare.html.j2")
    environment = Environment(autoescape=True, undefined=StrictUndefined)
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        headline=wording.headline(result),
        attribution=wording.attribution(result),
        picture=base64.b64encode(picture).decode("ascii"),
        runs=result.runs,
        rows=wording.rows(result),
        notes=wording.notes(result),
        from_logs=wording.from_logs(result),
        exposed=wording.exposed_bars(result),
        fallbacks=wording.fallback_lines(result),
        configs=configs,
    )


def write(result: Comparison, folder: Path, configs: Mapping[str, str]) -> None:
    """Write the three files: all made before the first is put in place, the JSON last."""
    from megatron_overlap.measure.figure import draw

    picture = draw(result)
    content = {
        PNG_FILE: picture,
        HTML_FILE: html(result, picture, configs).encode(),
        JSON_FILE: (json.dumps(_finite(result.as_dict()), indent=1, allow_nan=False) + "\n").encode(),
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
