"""Figures that know how sure they are: errors hold what they say, and what is not known decides nothing."""

from __future__ import annotations

import math
import random
from statistics import median, stdev

import pytest

from megatron_overlap.tune.timing import Timing


@pytest.mark.parametrize("late", [0.0, 0.1], ids=["normal", "one in ten very late"])
def test_the_error_is_what_medians_scatter_by(late: float) -> None:
    noise = random.Random(1)

    def sample() -> list[float]:
        return [noise.gauss(100, 10) + (noise.random() < late) * 500 for _ in range(24)]

    found = [Timing.median(sample()) for _ in range(2000)]
    scatter = stdev(each.us for each in found)
    assert median(each.error for each in found) == pytest.approx(scatter, rel=0.15)


def test_parts_add_up_and_their_errors_as_independent_ones_do() -> None:
    total = Timing.total([Timing(100, 3), Timing(50, 4)])
    assert total == Timing(150, 5)


def test_sure_is_two_errors_of_the_difference() -> None:
    slow = Timing(110, 3)
    assert slow.above(Timing(99.9, 4))
    assert not slow.above(Timing(100.1, 4))
    assert slow.alike(Timing(100.1, 4))
    assert not Timing(99.9, 4).alike(slow)


def test_out_and_winning_ask_for_both_a_share_and_certainty() -> None:
    best = Timing(100, 1)
    assert Timing(121, 1).out(1.2, best)
    assert not Timing(119, 1).out(1.2, best), "sure, and too little"
    assert not Timing(121, 12).out(1.2, best), "enough, and not sure"
    assert Timing(97, 0.5).wins(0.02, best)
    assert not Timing(98.5, 0.1).wins(0.02, best)
    assert not Timing(97, 3).wins(0.02, best)


def test_what_was_not_measured_decides_nothing() -> None:
    unknown, known = Timing(math.nan), Timing(100, 1)
    for first, second in ((unknown, known), (known, unknown)):
        assert not first.above(second)
        assert not first.out(1.2, second)
        assert not first.wins(0.02, second)
