"""The tables of docs/configuration.md, from the schema.

python scripts/pages/configuration.py             # prints them
python scripts/pages/configuration.py --write     # replaces them on the page
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_overlap.config.launch import PRESETS
from megatron_overlap.config.loading import json_schema

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
GENERATED = re.compile(r"(?<=<!-- keys: begin -->\n).*(?=<!-- keys: end -->)", flags=re.DOTALL)


def tables() -> str:
    """For each section of the schema a table, and a list by type of the keys without a description; the presets."""
    schema = json_schema()
    lines = []
    for title, section in _sections(schema, schema["$defs"], ""):
        lines.append(f"\n### {title}\n")
        rows: list[str] = []
        plain: dict[str, list[str]] = {}
        for key, what in section["properties"].items():
            if _reference(what) is not None:
                continue
            if meaning := _cell(what.get("description", "")):
                rows.append(f"| `{key}` | {_values(what)} | {meaning} |")
            else:
                plain.setdefault(_values(what), []).append(f"`{key}`")
        if rows:
            lines += ["| key | type, **default** | meaning |", "|---|---|---|", *rows]
        if rows and plain:
            lines.append("")
        lines += [f"- {', '.join(keys)}: {values}" for values, keys in plain.items()]
        if title == "`model`":
            lines.append(f"\nPresets: {', '.join(f'`{name}`' for name in PRESETS)}.")
    return "\n".join(lines) + "\n\n"


def _sections(section: dict[str, Any], defs: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """A section, then those inside it: title and schema."""
    yield f"`{path}`" if path else "Top level", section
    for key, what in section["properties"].items():
        name = _reference(what)
        if name is not None and "properties" in defs[name]:
            yield from _sections(defs[name], defs, f"{path}.{key}" if path else key)


def _reference(what: dict[str, Any]) -> str | None:
    for option in (what, *what.get("anyOf", ()), *what.get("allOf", ())):
        if "$ref" in option:
            return str(option["$ref"]).rpartition("/")[2]
    return None


def _values(what: dict[str, Any]) -> str:
    """The type, with the default in bold."""
    if "default" not in what:
        return _type(what)
    default = f"`{json.dumps(what['default'])}`".replace('"', "")
    values = _type(what)
    return values.replace(default, f"**{default}**") if default in values else f"{values}, **{default}**"


def _type(what: dict[str, Any]) -> str:
    if "anyOf" in what:
        return ", ".join(_type(option) for option in what["anyOf"] if option.get("type") != "null")
    if "enum" in what:
        return ", ".join(f"`{value}`" for value in what["enum"])
    if "const" in what:
        return f"`{what['const']}`"
    kind = str(what.get("type", "any"))
    bounds = {key: what[key] for key, _ in _BOUNDS if key in what}
    if bounds in ({"minimum": 1}, {"exclusiveMinimum": 0}):
        return f"positive {kind}"
    return " ".join([kind, *(f"{sign} {bounds[key]}" for key, sign in _BOUNDS if key in bounds)])


_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the tables on the page")
    if not parser.parse_args().write:
        sys.stdout.write(tables())
        return
    made = tables()
    PAGE.write_text(GENERATED.sub(lambda _: made, PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
