"""Workers for the tests of all operations. They end with the last test here: their idle threads of gloo poll."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.world import World


@pytest.fixture(scope="package")
def world() -> Iterator[World]:
    """Four workers, as in other tests, which start once: that takes a second."""
    workers = World()
    yield workers
    workers.close()
