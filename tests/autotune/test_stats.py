"""Figures that know how sure they are: errors hold what they say, and what is not known decides nothing."""

from __future__ import annotations

import math
import random
from statistics import median, quantiles

import pytest

from megatron_overlap.autotune.stats import Timing


@pytest.mark.parametrize("late", [0.0, 0.1], ids=["normal", "one in ten very late"])
def test_the_error_is_what_trimmed_means_scatter_by(late: float) -> None:
    noise = random.Random(1)

    def sample() -> list[float]:
        return [noise.gauss(100, 10) + (noise.random() < late) * 500 for _ in range(24)]

    found = [Timing.trimmed(sample()) for _ in range(2000)]
    # By the middle two thirds: in a few samples more are late than any middle withstands.
    steps = quantiles((each.us for each in found), n=100)
    scatter = (steps[83] - steps[15]) / 2
    assert median(each.error for each in found) == pytest.approx(scatter, rel=0.15)


def test_of_few_times_no_more_is_sure_than_of_many() -> None:
    noise = random.Random(1)
    for count in (6, 16, 32):
        found = [Timing.trimmed([noise.gauss(100, 10) for _ in range(count)]) for _ in range(8000)]
        wrong = sum(one.above(other) for one, other in zip(found[::2], found[1::2], strict=True)) / 4000
        assert 0.002 < wrong < 0.012, count


def test_a_call_takes_a_group_as_long_as_its_slowest_rank() -> None:
    """Each rank takes 100 in most calls, and the group never: someone is late in every one."""
    calls = [(100.0, 100.0, 100.0 + each) for each in range(20, 26)] + [(130.0, 100.0, 100.0), (100.0, math.nan, 1.0)]
    assert Timing.slowest(calls, 7).us == 123
    assert math.isnan(Timing.slowest(calls, 8).us), "the last call is not known to all"


def test_parts_add_up_and_their_errors_as_independent_ones_do() -> None:
    total = Timing.total([Timing(100, 3), Timing(50, 4)])
    assert total == Timing(150, 5)


def test_sure_is_two_and_a_half_errors_of_the_difference() -> None:
    slow = Timing(110, 3)
    assert slow.above(Timing(97.4, 4))
    assert not slow.above(Timing(97.6, 4))
    assert slow.alike(Timing(97.6, 4))
    assert not Timing(97.4, 4).alike(slow)


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
