"""Timings with standard errors: the errors are correct, and an unknown time is never slower or faster."""

from __future__ import annotations

import math
import random
from statistics import median, quantiles

import pytest

from megatron_overlap.autotune.search import Timing


@pytest.mark.parametrize("late", [0.0, 0.1], ids=["normal", "one in ten very late"])
def test_the_error_is_the_scatter_of_trimmed_means(late: float) -> None:
    noise = random.Random(1)

    def sample() -> list[float]:
        return [noise.gauss(100, 10) + (noise.random() < late) * 500 for _ in range(24)]

    found = [Timing.trimmed(sample()) for _ in range(2000)]
    # From the middle two thirds: a few samples have more late times than a trimmed mean leaves out.
    steps = quantiles((each.us for each in found), n=100)
    scatter = (steps[83] - steps[15]) / 2
    assert median(each.error for each in found) == pytest.approx(scatter, rel=0.15)


def test_few_times_are_as_rarely_wrong_as_many() -> None:
    noise = random.Random(1)
    for count in (6, 16, 32):
        found = [Timing.trimmed([noise.gauss(100, 10) for _ in range(count)]) for _ in range(8000)]
        wrong = sum(one.slower(other) for one, other in zip(found[::2], found[1::2], strict=True)) / 4000
        assert 0.002 < wrong < 0.012, count


def test_a_call_takes_a_group_as_long_as_its_slowest_rank() -> None:
    """Each rank takes 100 in most calls, but one rank is late in every call."""
    calls = [(100.0, 100.0, 100.0 + each) for each in range(20, 26)] + [(130.0, 100.0, 100.0), (100.0, math.nan, 1.0)]
    assert Timing.slowest(calls, 7).us == 123
    assert math.isnan(Timing.slowest(calls, 8).us), "one rank has no time of the last call"


def test_parts_and_their_independent_errors_add_up() -> None:
    total = Timing.total([Timing(100, 3), Timing(50, 4)])
    assert total == Timing(150, 5)


def test_certainty_needs_two_and_a_half_errors_of_the_difference() -> None:
    slow = Timing(110, 3)
    assert slow.slower(Timing(97.4, 4))
    assert not slow.slower(Timing(97.6, 4))
    assert not slow.differs(Timing(97.6, 4), 0.0)
    assert Timing(97.4, 4).differs(slow, 0.0)
    assert slow.slower(Timing(104.9, 4), errors=1.0)
    assert not slow.slower(Timing(105.1, 4), errors=1.0)


def test_slower_needs_both_the_gap_and_certainty() -> None:
    best = Timing(100, 1)
    assert Timing(121, 1).slower(best, 0.2)
    assert not Timing(119, 1).slower(best, 0.2), "certain, but less than the gap"
    assert not Timing(121, 12).slower(best, 0.2), "more than the gap, but not certain"
    assert Timing(121, 1).differs(best, 0.2)
    assert best.differs(Timing(121, 1), 0.2)
    assert not best.differs(Timing(119, 1), 0.2)


def test_an_unknown_time_is_never_slower() -> None:
    unknown, known = Timing(math.nan), Timing(100, 1)
    for first, second in ((unknown, known), (known, unknown)):
        assert not first.slower(second)
        assert not first.slower(second, 0.2)
        assert not first.differs(second, 0.0)
