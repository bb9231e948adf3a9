"""docs/configuration.md names every key, and its examples are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic import BaseModel

from megatron_overlap.config import LaunchConfig, OverlapConfig, load_launch_config, load_overlap_file
from megatron_overlap.config.loading import json_schema
from megatron_overlap.config.model_presets import PRESETS
from tests.config.samples import write

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_every_key_is_on_the_page() -> None:
    sections = [LaunchConfig.model_json_schema(), *json_schema()["$defs"].values()]
    keys = {key for section in sections for key in section["properties"]}
    missing = {key for key in keys if not re.search(rf"[`.]{key}[`:.]", PAGE)}
    assert not missing


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_on_the_page(name: str) -> None:
    family, _, size = name.partition("_")
    row = next(line for line in PAGE.splitlines() if "`model.preset`" in line)
    assert f"`{name}`" in row or re.search(rf"`{family}_[^;]*`{re.escape(size)}`", row)


def test_the_examples_load(tmp_path: Path) -> None:
    whole, alone = EXAMPLES
    assert isinstance(load_launch_config(write(tmp_path, whole)), BaseModel)
    found = load_overlap_file(write(tmp_path, alone)).overlap
    assert found == OverlapConfig.model_validate({"tensor": {"method": "p2p"}, "strict": True})
