"""Generated pages and quoted code agree with the package."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from megatron_overlap.config import load_launch_config
from megatron_overlap.config.command import json_schema
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan
from tests.helpers.releases import ROOT

CONFIGS = sorted((ROOT / "configs").glob("*_overlap.yaml"))
ON_GPUS = [file for file in CONFIGS if load_launch_config(file).launch.device == "cuda"]


def test_the_page_quotes_the_present_schedules() -> None:
    page = (ROOT / "docs" / "design" / "architecture.md").read_text()
    assert f"{all_gather_plan(4, 1).describe()}\n\n{reduce_scatter_plan(4, 1).describe()}\n```" in page


def test_every_key_is_on_the_generated_page() -> None:
    page = runpy.run_path(str(ROOT / "scripts" / "pages" / "reference.py"))["page"]()
    sections = [section for section in json_schema()["$defs"].values() if "properties" in section]
    keys = {key for section in [json_schema(), *sections] for key in section["properties"]}
    # Sections have a heading, keys a row.
    missing = {key for key in keys if f"| `{key}` |" not in page and not re.search(rf"## `(\w+\.)*{key}`", page)}
    assert not missing


def test_every_page_is_in_the_navigation() -> None:
    named = set(re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE))
    docs = ROOT / "docs"
    assert {str(page.relative_to(docs)) for page in docs.rglob("*.md")} <= named


@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_config_states_the_simulated_mfu(file: Path) -> None:
    """The stated MFU is within two points, so that a change of the cost model need not update every file."""
    sentence = runpy.run_path(str(ROOT / "scripts" / "expected_mfu.py"))["sentence"](load_launch_config(file))
    stated = re.search(r"^# Expected, modelled: (.*)\.$", file.read_text(), flags=re.MULTILINE)
    assert stated is not None
    numbers = [[int(n) for n in re.findall(r"(\d+) %", text)] for text in (stated[1], sentence)]
    assert len(numbers[0]) == len(numbers[1])
    assert all(abs(a - b) <= 2 for a, b in zip(*numbers, strict=True)), sentence
    assert re.sub(r"\d+", "", stated[1]) == re.sub(r"\d+", "", sentence)
