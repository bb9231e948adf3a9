"""From one step time down to the other: nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from megatron_overlap.tools.compare import text
from megatron_overlap.tools.compare.breakdown import OTHER, REST, Waterfall, waterfalls
from megatron_overlap.tools.compare.comparison import Comparison, compare
from megatron_overlap.tools.compare.comparison_json import comparison_content
from megatron_overlap.tools.launch.run_records import RunRecord, StepExposed
from tests.tools.compare.samples import record, side

BIG, SMALL = ("gather", "forward"), ("tiny", "backward")
COMES = ("linear", "dgrad")


def traced(times: Sequence[float], ops: Sequence[Mapping[tuple[str, str], float]], twice_ms: float = 0) -> RunRecord:
    """A run whose first two steps, which do not count, waited for ever; `twice_ms`: two ops waited at once."""
    steps = [StepExposed(sum(one.values()) - twice_ms, one) for one in ops]
    never = StepExposed(1e6, {BIG: 1e6})
    return replace(record([9, 9, *times]), exposed=(never, never, *steps))


def compared(twice_ms: float = 0) -> Comparison:
    base = traced([100, 110, 120], [{BIG: 50, SMALL: 0.5}, {BIG: 40, SMALL: 0.6}, {BIG: 60, SMALL: 0.7}], twice_ms)
    other = traced([80, 70, 90], [{BIG: 5, COMES: 12}, {BIG: 6, COMES: 10}, {BIG: 4, COMES: 14, SMALL: 0.1}])
    return compare([side("plain", [base]), side("hidden", [other])])


def rows(fall: Waterfall) -> dict[str, tuple[float, float]]:
    return {change.label: (change.before_ms, change.after_ms) for change in fall.changes}


@pytest.mark.parametrize("twice_ms", [0.0, 7.0])
def test_the_rows_add_up_to_both_steps(twice_ms: float) -> None:
    (fall,) = waterfalls(compared(twice_ms))
    assert (fall.reference_ms, fall.run_ms) == (110, 80)
    assert sum(change.before_ms for change in fall.changes) == pytest.approx(110)
    assert sum(change.after_ms for change in fall.changes) == pytest.approx(80)
    assert fall.changes[0].start_ms == 110
    assert fall.changes[-1].stop_ms == pytest.approx(80)
    for above, below in zip(fall.changes, fall.changes[1:], strict=False):
        assert above.stop_ms == below.start_ms


def test_every_row_by_hand() -> None:
    (fall,) = waterfalls(compared())
    # All waits: 50.5, 40.6, 60.7 and 17, 16, 18.1.
    assert rows(fall) == {
        "gather forward": (50, 5),
        "linear dgrad": (0, 12),
        OTHER: (pytest.approx(0.5), pytest.approx(0)),
        REST: (pytest.approx(59.5), pytest.approx(63)),
    }
    assert fall.grouped == ("tiny backward",)
    assert fall.reference_floor_ms == pytest.approx(59.5)
    assert [change.label for change in fall.changes][:2] == ["gather forward", "linear dgrad"]  # less first
    assert fall.largest_ms == 110
    assert "59.5 ms (compute-only floor" in text.roof(fall)
    assert "1.85 times that, hidden 1.34 times" in text.roof(fall)


def test_the_floor_is_the_step_less_its_waits_everywhere() -> None:
    result = compared(twice_ms=7)
    (fall,) = waterfalls(result)
    written = comparison_content(result)["runs"]
    assert [run["exposed"]["floor_ms"] for run in written] == pytest.approx([66.5, 63])
    assert (fall.reference_floor_ms, fall.run_floor_ms) == pytest.approx((66.5, 63))
    cells = {row.label: row.cells for row in text.rows(result)}
    assert cells["compute-only floor, ms"] == ("66.5", "63.0")


def test_at_most_eight_ops_have_a_row() -> None:
    ops = {(f"op{number}", "forward"): 2.0 + number for number in range(12)}
    (fall,) = waterfalls(compare([side("a", [traced([200], [ops])]), side("b", [traced([100], [{}])])]))
    assert [change.label for change in fall.changes] == [
        *(f"op{number} forward" for number in range(11, 3, -1)),
        OTHER,
        REST,
    ]
    assert rows(fall)[OTHER] == (2 + 3 + 4 + 5, 0)


def test_one_that_grows_longer_than_the_reference_fits() -> None:
    (fall,) = waterfalls(compare([side("a", [traced([50], [{BIG: 5}])]), side("b", [traced([90], [{BIG: 30}])])]))
    assert fall.largest_ms == 90


def test_none_without_events_of_both() -> None:
    plain, recorded = side("a", [record([9, 9, 100])]), side("b", [traced([50], [{BIG: 5}])])
    assert waterfalls(compare([plain, recorded])) == []
    assert waterfalls(compare([recorded, plain])) == []
