"""Fixtures of all tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.helpers.world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Worker processes that live as long as the test run."""
    workers = World()
    yield workers
    workers.close()


def pytest_configure() -> None:
    # A shell starts its background jobs with SIGINT ignored, and programs inherit that: tests of Ctrl-C would
    # wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
