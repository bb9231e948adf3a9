"""Measurements of `doctor`: times of communication on real ranks, and the number of GEMMs before a message."""

from __future__ import annotations

import pytest

from megatron_overlap.tools.doctor.machine import late_gemms
from tests.helpers.world import World
from tests.tools.doctor import machine_workers as workers


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_in_turn_begins_last_and_its_time_counts(world: World, size: int) -> None:
    answers = world.run(size, workers.apart)
    (figure,) = {us for us, _ in answers}  # the same on all ranks
    # The time without the delay before it.
    assert 1e6 * workers.RUN_S <= figure < 1e6 * workers.RUN_S + 0.9 * workers.APART_US
    calls = list(zip(*(starts for _, starts in answers), strict=True))
    last = [starts.index(max(starts)) for starts in calls]
    # On a busy machine another rank can be later by accident.
    assert sum(rank == number % size for number, rank in enumerate(last)) > 0.7 * len(last)


def test_lateness_is_measured_after_10_and_40_ms_of_gemms() -> None:
    assert late_gemms(1250.0) == (8, 32)
    assert late_gemms(1e5) == (1, 4)
