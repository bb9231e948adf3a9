"""Shared memory of the tests of kernels."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Folder of files that this process and the workers map as shared memory."""
    folder = Path("/dev/shm") / f"{tmp_path.parent.name}-{tmp_path.name}-{os.getpid()}"
    folder.mkdir()
    yield folder
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
