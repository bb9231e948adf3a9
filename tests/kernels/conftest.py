"""Workers whose Triton is the interpreter: the switch is read when triton is imported, so not in this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.world import World


def _interpreting(size: int) -> World:
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Five processes on two cores, in an interpreter: slow, and not what is tested.
        return World(size, answer_s=900)
    finally:
        del os.environ["TRITON_INTERPRET"]


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    """Two interpreting workers."""
    workers = _interpreting(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Four interpreting workers."""
    workers = _interpreting(4)
    yield workers
    workers.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder whose files are memory shared by this process and the workers."""
    folder = Path("/dev/shm") / f"{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
