"""The call path from `ColumnParallelLinear.forward` to the first bytes of a message, with `method: p2p` over gloo."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.tensor_parallel import call_path_workers as workers
from tests.helpers.world import World

RANKS = 2
MAX_FILES = 12
COMMAND = "python -m tests.adapters.tensor_parallel.call_path_workers"


@pytest.fixture(scope="module")
def functions() -> Iterator[list[tuple[str, str]]]:
    """File and name of each function on the path, on rank 0."""
    world = World(RANKS, answer_s=240, sizes=(RANKS,), adapted=True)
    yield world.run(RANKS, workers.record)[0]
    world.close()


def test_a_forward_passes_at_most_12_files(functions: list[tuple[str, str]]) -> None:
    files = list(dict.fromkeys(file for file, _ in functions))
    assert files[0] == "adapters/tensor_parallel/linear.py"
    assert ("comm/gloo.py", "GlooP2PWork.send_next") in functions
    assert len(files) <= MAX_FILES, files


def test_no_function_on_the_path_is_anonymous(functions: list[tuple[str, str]]) -> None:
    assert [name for _, name in functions if "<lambda>" in name] == []


def test_the_page_lists_the_path(functions: list[tuple[str, str]]) -> None:
    page = workers.PAGE.read_text(encoding="utf-8")
    assert workers.section_of(page) == workers.section(functions), f"run {COMMAND}"
