"""Times of what ranks do together, on real ranks."""

from __future__ import annotations

import pytest

from tests.helpers.world import World
from tests.tools.doctor import timed_workers as cases


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_in_turn_begins_last_and_its_time_counts(world: World, size: int) -> None:
    answers = world.run(size, cases.apart)
    (figure,) = {us for us, _ in answers}  # the same on all ranks
    # What it waited for is not in it.
    assert 1e6 * cases.TAKES_S <= figure < 1e6 * cases.TAKES_S + 0.9 * cases.APART_US
    calls = list(zip(*(began for _, began in answers), strict=True))
    last = [begins.index(max(begins)) for begins in calls]
    # A rank that is late by itself, on a busy machine, comes last when it is another one's turn.
    assert sum(rank == number % size for number, rank in enumerate(last)) > 0.7 * len(last)
