"""Percentiles, paired ratios and deviations, by hand and against numpy."""

from __future__ import annotations

import math
import random

import numpy
import pytest

from megatron_overlap.tools.compare.stats import NotComparableError, Spread, max_deviation, paired_ratios, percentile


def test_percentiles_are_numpys() -> None:
    draw = random.Random(1)
    for size in (1, 2, 3, 7, 40):
        values = [draw.random() for _ in range(size)]
        for percent in (0, 20, 50, 80, 100):
            assert percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)), rel=1e-12)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)


def test_spread_by_hand() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Spread(median=3.5, p20=2.0, p80=5.0)


def test_a_slow_round_cancels_in_the_ratio() -> None:
    ratios = paired_ratios([[100.0, 100.0, 130.0], [300.0, 300.0]], [[50.0, 50.0, 50.0], [150.0, 150.0, 900.0]])
    assert ratios == [2.0, 2.0]


def test_rounds_must_pair() -> None:
    with pytest.raises(ValueError):
        paired_ratios([[1.0]], [[1.0], [1.0]])


def test_largest_relative_deviation() -> None:
    assert max_deviation([2.0, -4.0, 1.0], [2.0, -4.4, 1.01], "loss") == pytest.approx(0.1)
    assert max_deviation([0.0], [0.5], "loss") == 0.5
    assert max_deviation([None, 1.0], [3.0, 1.0], "loss") == 0.0
    assert max_deviation([None], [3.0], "loss") is None
    assert max_deviation([math.nan, 1.0], [math.nan, 1.0], "loss") == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_against_none_is_no_small_deviation(bad: float) -> None:
    for pair in (([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, 2.0])):
        with pytest.raises(NotComparableError, match="loss of iteration 2"):
            max_deviation(*pair, "loss")
