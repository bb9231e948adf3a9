"""Fixtures of all tests."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from tests.helpers.forked_python import ForkedPython
from tests.helpers.world import SERVERS, World

settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


@pytest.fixture(scope="session", autouse=True)
def shared_servers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All workers of pytest-xdist fork from the same servers, whose imports take seconds."""
    # A fork ends without removing its copies of the package; pytest removes its own folders.
    os.environ["COPIES_FOLDER"] = str(tmp_path_factory.mktemp("copies"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)  # the other workers use the other cores
        SERVERS.folder = tmp_path_factory.getbasetemp().parent


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """Four workers. Their end costs less than their idle threads of gloo, which poll."""
    workers = World()
    yield workers
    workers.close()


@pytest.fixture(scope="module")
def interpreting() -> Iterator[World]:
    """Four workers that run Triton kernels in its interpreter, which is slow."""
    workers = World(answer_s=900, interpreted=True)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def forked_python() -> Iterator[ForkedPython]:
    """A Python for the ranks of launches, which start as forks."""
    python = ForkedPython()
    yield python
    python.close()


def pytest_configure() -> None:
    gc.disable()  # until all tests are found
    # A shell starts its background jobs with SIGINT ignored, and programs inherit that: tests of Ctrl-C would
    # wait for ever.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Later collections of garbage leave out the modules and the tests: visiting 700,000 objects takes 0.4 s."""
    gc.freeze()
    gc.enable()
