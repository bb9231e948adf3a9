"""The page of every configuration key, from the schema: `python scripts/pages/reference.py` prints it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

from megatron_overlap.config.loading import json_schema

HEAD = """# Every key

Made from the schema that the loader checks with (`megatron-overlap schema`); nothing here is written by hand.
[configuration.md](configuration.md) says how files are put together and what the errors look like.
"""


def page() -> str:
    """The page as Markdown."""
    schema = json_schema()
    lines = [HEAD]
    for title, section in _sections(schema, schema["$defs"], ""):
        lines += [f"\n## {title}\n", "| key | type | default | |", "|---|---|---|---|"]
        for key, what in section["properties"].items():
            if _reference(what) is not None:
                continue
            default = f"`{json.dumps(what['default'])}`" if "default" in what else ""
            lines.append(f"| `{key}` | {_type(what)} | {default} | {_cell(what.get('description', ''))} |")
    return "\n".join(lines) + "\n"


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


def _type(what: dict[str, Any]) -> str:
    if "anyOf" in what:
        return ", ".join(_type(option) for option in what["anyOf"])
    if "enum" in what:
        return ", ".join(f"`{value}`" for value in what["enum"])
    if "const" in what:
        return f"`{what['const']}`"
    bounds = [f"{sign} {what[key]}" for key, sign in _BOUNDS if key in what]
    return " ".join([str(what.get("type", "any")), *bounds])


_BOUNDS = (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="), ("exclusiveMaximum", "<"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
