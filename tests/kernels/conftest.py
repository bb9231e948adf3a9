"""Worker processes that interpret kernels, and their shared memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.interpreting import interpreting_world
from tests.helpers.world import World


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[World]:
    """Two interpreting workers."""
    workers = interpreting_world(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def four_ranks() -> Iterator[World]:
    """Four interpreting workers."""
    workers = interpreting_world(4)
    yield workers
    workers.close()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Folder of files that this process and the workers map as shared memory."""
    folder = Path("/dev/shm") / f"{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
