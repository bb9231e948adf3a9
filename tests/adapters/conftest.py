"""Workers for the tests of Megatron's layers. They end with the last test here: their idle threads of gloo poll."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version

import pytest

from tests.adapters.tensor_parallel import linear_workers
from tests.helpers.world import World

RANKS = 2
"""Ranks of most tests. Four ranks on two cores take three times as long; `tests/ops` tests operations on up to four."""

needs_training = pytest.mark.skipif(
    version("megatron-core") < "0.17", reason="the wheel of megatron-core 0.16 has no megatron.training"
)


def _started(size: int, *, te: bool = False) -> Iterator[World]:
    workers = World(size, answer_s=120, adapted=True, te=te)
    workers.run(size, linear_workers.start)
    yield workers
    workers.close()


@pytest.fixture(scope="package")
def ranks() -> Iterator[World]:
    """Workers of their own: Megatron's classes and groups, once made in a process, stay."""
    yield from _started(RANKS)


@pytest.fixture(scope="package")
def four_ranks() -> Iterator[World]:
    """As `ranks`, for what two ranks cannot show: several peers, rings, nodes, groups of two kinds."""
    yield from _started(4)


@pytest.fixture(scope="package")
def te_ranks() -> Iterator[World]:
    """Workers with TransformerEngine; the tests that use them carry `needs_te`."""
    yield from _started(RANKS, te=True)


@pytest.fixture(scope="package")
def four_te_ranks() -> Iterator[World]:
    yield from _started(4, te=True)
