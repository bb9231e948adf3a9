"""Fixtures of all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Worker processes that live as long as the test run."""
    workers = World()
    yield workers
    workers.close()
