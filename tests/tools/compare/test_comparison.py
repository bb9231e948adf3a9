"""The figures of a comparison from known records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_overlap.tools.compare.comparison import (
    NotComparableError,
    Spread,
    compare,
    max_deviation,
    paired_ratios,
)
from tests.tools.compare.samples import LINK, record, side, written

KEYS = {"runs", "speedup", "max_loss_deviation", "max_grad_norm_deviation", "link", "versions"}
RUN_KEYS = {
    "name",
    "step_time_ms",
    "tokens_per_s",
    "tflops_per_device",
    "mfu",
    "peak_tflops",
    "flops_convention",
    "peak_memory_bytes",
    "losses",
    "grad_norms",
}


def test_every_figure_by_hand() -> None:
    a = side("a", [record([900, 900, 200, 220, 180], memory=1000), record([900, 900, 400, 400, 400], memory=1100)])
    b = side("b", [record([900, 900, 100, 100, 100], memory=1155), record([900, 900, 320, 310, 330], memory=1000)])
    result = written(compare([a, b]))

    assert result.keys() >= KEYS
    first, second = result["runs"]
    assert first.keys() >= RUN_KEYS
    # 180 200 220 400 400 400: the first two of each launch do not count.
    assert first["step_time_ms"] == {"median": 310.0, "p20": 200.0, "p80": 400.0}
    assert first["tokens_per_s"] == pytest.approx(512 / 0.310)
    assert first["tflops_per_device"] == pytest.approx(4e9 / 0.310 / 2 / 1e12)
    assert first["mfu"] == pytest.approx(4e9 / 0.310 / 2 / 1e12 / 0.1)
    assert first["peak_tflops"] == 0.1
    assert first["peak_memory_bytes"] == 1100
    assert second["name"] == "b"
    # Rounds: 200/100 and 400/320.
    assert result["speedup"] == pytest.approx({"median": 1.625, "p20": 1.4, "p80": 1.85})
    assert result["against_first"][0]["speedup_rounds"] == [2.0, 1.25]
    # Rounds: 1155/1000 and 1000/1100.
    assert result["against_first"][0]["memory_ratio"] == pytest.approx((1155 / 1000 + 1000 / 1100) / 2)
    assert result["link"] == LINK
    assert result["versions"]["torch"] == "2.13.0"


def test_evaluations_are_compared_within_each_round() -> None:
    times = {"a": ((30.0, 50.0), (80.0,)), "b": ((20.0, 20.0), (20.0,))}
    sides = [
        side(name, [replace(record([1, 1, 1]), evaluation_ms=each) for each in rounds])
        for name, rounds in times.items()
    ]
    result = written(compare(sides))
    assert [run["evaluation_ms"]["median"] for run in result["runs"]] == [50.0, 20.0]
    assert result["against_first"][0]["evaluation_speedup"] == pytest.approx({"median": 3.0, "p20": 2.4, "p80": 3.6})
    without = written(compare([sides[0], side("b", [record([1, 1, 1])] * 2)]))
    assert without["against_first"][0]["evaluation_speedup"] is without["runs"][1]["evaluation_ms"] is None


def test_deviation_is_the_largest_of_all_rounds_and_iterations_warm_up_included() -> None:
    good = record([1, 1, 1], losses=[4.0, 4.0, 4.0], grad_norms=[2.0, 2.0, 2.0])
    off = record([1, 1, 1], losses=[4.2, 4.0, 4.0], grad_norms=[2.0, 2.0, 2.5])
    result = compare([side("a", [good, good]), side("b", [good, off])])
    assert result.headline.max_loss_deviation == pytest.approx(0.05)
    assert result.headline.max_grad_norm_deviation == pytest.approx(0.25)
    assert result.runs[0].own_loss_deviation == 0.0
    assert result.runs[1].own_loss_deviation == pytest.approx(0.05)
    assert written(result)["max_loss_deviation"] == pytest.approx(0.05)


def test_a_loss_that_is_nan_in_one_run_is_an_error() -> None:
    good, nan = record([1, 1, 1]), record([1, 1, 1], losses=[8.0, math.nan, 7.0])
    with pytest.raises(NotComparableError, match="b: loss of iteration 2"):
        compare([side("a", [good]), side("b", [nan])])


def test_the_two_parts_of_a_speedup_multiply_to_it() -> None:
    a, b, serial = ([record([9, 9, *times])] for times in ([120.0] * 3, [60.0] * 3, [80.0] * 3))
    result = compare([side("a", a), side("b", b), side("b_serial", serial)], serial=True)
    assert result.attribution is not None
    assert result.attribution.faster_collective.median == pytest.approx(1.5)
    assert result.attribution.overlap.median == pytest.approx(80 / 60)
    assert written(result)["speedup"]["median"] == pytest.approx(1.5 * 80 / 60)
    assert [entry.name for entry in result.against] == ["b", "b_serial"]


def test_unknown_flops_are_null() -> None:
    rounds = [record([1, 1, 1])]
    result = written(compare([side("a", rounds, flops=None), side("b", rounds, flops=None)]))
    assert result["runs"][0]["tflops_per_device"] is None
    assert result["runs"][0]["mfu"] is None
    assert result["runs"][0]["tokens_per_s"] > 0


def test_spread_by_hand() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0, 6.0]) == Spread(median=3.5, p20=2.0, p80=5.0)


def test_a_slow_round_cancels_in_the_ratio() -> None:
    ratios = paired_ratios([[100.0, 100.0, 130.0], [300.0, 300.0]], [[50.0, 50.0, 50.0], [150.0, 150.0, 900.0]])
    assert ratios == [2.0, 2.0]


def test_both_runs_need_the_same_number_of_rounds() -> None:
    with pytest.raises(ValueError):
        paired_ratios([[1.0]], [[1.0], [1.0]])


def test_largest_relative_deviation() -> None:
    assert max_deviation([2.0, -4.0, 1.0], [2.0, -4.4, 1.01], "loss") == pytest.approx(0.1)
    assert max_deviation([0.0], [0.5], "loss") == 0.5
    assert max_deviation([None, 1.0], [3.0, 1.0], "loss") == 0.0
    assert max_deviation([None], [3.0], "loss") is None
    assert max_deviation([math.nan, 1.0], [math.nan, 1.0], "loss") == 0.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_finite_in_one_run_only_is_an_error(bad: float) -> None:
    for pair in (([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, 2.0])):
        with pytest.raises(NotComparableError, match="loss of iteration 2"):
            max_deviation(*pair, "loss")
