"""docs/configuration.md has the tables of the schema, and its examples are right."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

from pydantic import BaseModel

from megatron_overlap.config import OverlapConfig, load_launch_config, load_overlap_file
from megatron_overlap.config.loading import json_schema
from tests.config.samples import write

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_tables_are_those_of_the_schema() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "pages" / "configuration.py"))
    (on_page,) = script["GENERATED"].findall(PAGE)
    assert on_page == script["tables"](), "run: python scripts/pages/configuration.py --write"


def test_every_key_is_in_the_tables() -> None:
    tables = runpy.run_path(str(ROOT / "scripts" / "pages" / "configuration.py"))["tables"]()
    sections = [section for section in json_schema()["$defs"].values() if "properties" in section]
    keys = {key for section in [json_schema(), *sections] for key in section["properties"]}
    # Sections have a heading; keys have a row of a table, or a place in the list below it.
    places = r"^(\| `{key}` \||- .*`{key}`.*: |### `(\w+\.)*{key}`)"
    assert not {key for key in keys if not re.search(places.format(key=key), tables, flags=re.MULTILINE)}


def test_the_examples_load(tmp_path: Path) -> None:
    whole, alone = EXAMPLES
    assert isinstance(load_launch_config(write(tmp_path, whole)), BaseModel)
    found, _ = load_overlap_file(write(tmp_path, alone))
    assert found == OverlapConfig.model_validate({"tensor": {"method": "p2p"}, "strict": True})
