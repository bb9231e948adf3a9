"""The rows of a breakdown add up to both step times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.breakdown import COMPUTATION, REMAINING_WAITS, Breakdown, breakdowns
from megatron_overlap.tools.compare.comparison import Comparison, TypicalStep, compare
from megatron_overlap.tools.launch.run_records import RunRecord, StepExposed
from tests.tools.compare.samples import record, side, written

BIG, SMALL = ("gather", "forward"), ("tiny", "backward")
COMES = ("linear", "dgrad")


def traced(times: Sequence[float], ops: Sequence[Mapping[tuple[str, str], float]], twice_ms: float = 0) -> RunRecord:
    """A run whose two warm-up steps waited for a very long time. `twice_ms`: time in which two ops waited at once."""
    steps = [StepExposed(sum(one.values()) - twice_ms, one) for one in ops]
    never = StepExposed(1e6, {BIG: 1e6})
    return replace(record([9, 9, *times]), exposed=(never, never, *steps))


def compared(twice_ms: float = 0) -> Comparison:
    base = traced([100, 110, 120], [{BIG: 50, SMALL: 0.5}, {BIG: 40, SMALL: 0.6}, {BIG: 60, SMALL: 0.7}], twice_ms)
    other = traced([80, 70, 90], [{BIG: 5, COMES: 12}, {BIG: 6, COMES: 10}, {BIG: 4, COMES: 14, SMALL: 0.1}])
    return compare([side("plain", [base]), side("hidden", [other])])


def rows(part: Breakdown) -> dict[str, tuple[float, float]]:
    return {change.label: (change.before_ms, change.after_ms) for change in part.changes}


@pytest.mark.parametrize("twice_ms", [0.0, 7.0])
def test_the_rows_add_up_to_both_steps(twice_ms: float) -> None:
    (part,) = breakdowns(compared(twice_ms))
    assert (part.reference_ms, part.run_ms) == (110, 80)
    assert sum(change.before_ms for change in part.changes) == pytest.approx(110)
    assert sum(change.after_ms for change in part.changes) == pytest.approx(80)


def test_every_row_by_hand(tmp_path: Path) -> None:
    result = compared()
    (part,) = breakdowns(result)
    # Sums of the waits: 50.5, 40.6, 60.7 and 17, 16, 18.1.
    assert rows(part) == {
        "gather forward": (50, 5),
        "linear dgrad": (0, 12),
        REMAINING_WAITS: (pytest.approx(0.5), pytest.approx(0)),
        COMPUTATION: (pytest.approx(59.5), pytest.approx(63)),
    }
    assert part.grouped == ("tiny backward",)
    assert part.reference_floor_ms == pytest.approx(59.5)
    assert [change.label for change in part.changes][:2] == ["gather forward", "linear dgrad"]  # less first
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert "Compute-only floor of plain: 59.5 ms" in page
    assert "1.85 times the floor, that of hidden 1.34 times" in page
    assert "\N{MINUS SIGN}45.0" in page


def test_the_floor_is_the_same_in_json_table_and_breakdown() -> None:
    result = compared(twice_ms=7)
    (part,) = breakdowns(result)
    runs = written(result)["runs"]
    assert [run["exposed"]["floor_ms"] for run in runs] == pytest.approx([66.5, 63])
    assert (part.reference_floor_ms, part.run_floor_ms) == pytest.approx((66.5, 63))
    cells = {row.label: row.cells for row in report.rows(result)}
    assert cells["compute-only floor, ms"] == ("66.5", "63.0")


def test_at_most_eight_ops_have_a_row() -> None:
    ops = {(f"op{number}", "forward"): 2.0 + number for number in range(12)}
    (part,) = breakdowns(compare([side("a", [traced([200], [ops])]), side("b", [traced([100], [{}])])]))
    assert [change.label for change in part.changes] == [
        *(f"op{number} forward" for number in range(11, 3, -1)),
        REMAINING_WAITS,
        COMPUTATION,
    ]
    assert rows(part)[REMAINING_WAITS] == (2 + 3 + 4 + 5, 0)


def test_a_breakdown_needs_events_of_both_runs() -> None:
    plain, recorded = side("a", [record([9, 9, 100])]), side("b", [traced([50], [{BIG: 5}])])
    assert breakdowns(compare([plain, recorded])) == []
    assert breakdowns(compare([recorded, plain])) == []


def test_the_page_names_the_timeline_of_the_step_nearest_the_median(tmp_path: Path) -> None:
    plain = [traced(times, [{BIG: 20}] * 3) for times in ([300, 310, 320], [90, 121, 95], [80, 200, 301])]
    hidden = [record([9, 9, *times]) for times in ([30, 40, 60], [90, 65, 95], [10, 11, 70])]
    result = compare([side("plain", plain), side("hidden", hidden)])
    assert [run.typical_step for run in result.runs] == [TypicalStep(3, 4, 200), TypicalStep(1, 5, 60)]
    runs = written(result)["runs"]
    assert runs[0]["typical_step"] == {"round": 3, "iteration": 4, "step_time_ms": 200}
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert "plain: iteration 4 of round 3 took 200.0 ms, nearest to the median." in page
    assert f"megatron-overlap trace {tmp_path / 'runs' / 'round3-plain'} --steps 4<" in page
    assert "hidden recorded no events; set overlap.trace=true to record them." in page


def test_of_two_steps_equally_near_the_median_the_earlier_one_is_typical() -> None:
    result = compare([side("a", [record([9, 9, 100, 80])]), side("b", [record([9, 9, 80, 100])])])
    assert [run.typical_step for run in result.runs] == [TypicalStep(1, 3, 100), TypicalStep(1, 3, 80)]
