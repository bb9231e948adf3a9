"""Workers for the tests of Megatron's layers. They end with the last test here: their idle threads of gloo poll."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.adapters.tensor_parallel import linear_workers
from tests.helpers.world import World

RANKS = 4


@pytest.fixture(scope="package")
def ranks() -> Iterator[World]:
    """Workers of their own: Megatron's classes and groups, once made in a process, stay."""
    workers = World(answer_s=120, adapted=True)
    workers.run(RANKS, linear_workers.start)
    yield workers
    workers.close()


@pytest.fixture(scope="package")
def te_ranks() -> Iterator[World]:
    """Workers with TransformerEngine; the tests that use them carry `needs_te`."""
    workers = World(answer_s=120, te=True)
    workers.run(RANKS, linear_workers.start)
    yield workers
    workers.close()
