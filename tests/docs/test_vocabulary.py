"""The package and its documentation use the terms of the field: names, docstrings, messages, keys and pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (("megatron_overlap", "*.py"), ("patches", "*.yaml"), ("configs", "*.yaml"), ("docs", "*.md"))
SOURCES = [ROOT / "README.md", *(file for folder, ending in FOLDERS for file in sorted((ROOT / folder).rglob(ending)))]
# A term that must not occur, as a pattern over lower-case words, and the term of the field.
TERMS = {
    "Megatron's own|own path": "stock path",
    "why_?not": "unsupported_reason",
    "wires?": "message, Transfer",
    "(?<!in_)(?<!in )flights?(?![_ ]recorder)": "P2PWork, operation",
    "landed|landing(?!s?_)": "is_completed, received",
    "lanes?": "channel",
    "workspaces?": "BufferPool",
    "arrivals|departures": "PipelinedAllGather, PipelinedReduceScatter",
    "backlogs?": "deferred weight gradient",
    "pulses?": "heartbeat",
    "council": "HostGroup",
    "everything_?said|disagree(ment|s)?": "consistency check",
    "withdrawn?|withdrawals?": "reverted",
    "serve[sd]?|serving": "run, select",
    "halves|half_of_a_micro": "batch overlap",
    "handing[_ ]on|handed[_ ]on|hand[_ ]on": "layer handoff",
    "circles?": "ring group",
    "visit(s|ed|ing)?": "ring step",
    "remap(s|ped|ping)?": "rebalance",
    "usual(ly)?": "default, heuristics",
    "keepers?|kept": "saved",
    "other[_ ]waits|stood still|stands? still": "collective wait time",
    "leftovers?": "orphaned processes",
    '(?<!overflow=")fold(s|ed|ing)?': "downscale",
    "nobody|somebody|everybody|whoever|who(?= (waits|asks|comes|needs|reads))": "name the actor",
    "on (its|their) way": "pending, in flight",
    "tell(s|ing)?|told|said|says?|speaks?": "report, return, name",
    "goes home|go home|comes home|at home": "owner",
    "passages?|trips?": "message, transfer",
}


def uses(text: str) -> list[str]:
    """Each line of `text` that uses a term which TERMS replaces."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", line)
        for pattern, term in TERMS.items():
            match = re.search(rf"(?<![A-Za-z])(?:{pattern})(?![A-Za-z])", words, re.IGNORECASE)
            if match:
                found.append(f"{number}: {match[0]!r}: use {term}: {line.strip()}")
    return found


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_terms_of_the_field(file: Path) -> None:
    assert not uses(file.read_text(encoding="utf-8"))


def test_a_replaced_term_is_found_in_every_spelling() -> None:
    for line in ("self._backlog = 1", "class KeyKeeper:", "# nobody waits", '"Megatron\'s own path"', "num_lanes = 2"):
        assert uses(line), line
