"""The list of mutants follows the program: every line that it changes is there, once, and the result is a program."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from scripts.mutants import ROOT, Mutant, load

MUTANTS = list(load())


def test_there_are_enough() -> None:
    assert len(MUTANTS) >= 60
    assert {mutant.kind for mutant in MUTANTS} >= {"schedules", "ops", "partition", "engine"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.number))
def test_a_mutant_can_be_made(mutant: Mutant, tmp_path: Path) -> None:
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    copy.write_text(text_of(mutant.file), encoding="utf-8")
    mutant.apply(tmp_path)
    assert program_of(copy.read_text(encoding="utf-8")) != program_of(text_of(mutant.file))
    for test in mutant.tests:
        path, _, name = test.partition("[")[0].partition("::")
        assert (ROOT / path).exists(), test
        assert not name or f"def {name}(" in text_of(path), test


@cache
def text_of(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")


@cache
def program_of(text: str) -> str:
    """The syntax tree, without comments and places."""
    return ast.dump(ast.parse(text))
