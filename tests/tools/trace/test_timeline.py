"""The step of each run that the report draws: the right one, on one clock; and a report whatever the files are."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.comparison import Comparison, TypicalStep, compare
from megatron_overlap.tools.compare.comparison_json import comparison_content
from megatron_overlap.tools.compare.rounds import run_folder
from megatron_overlap.tools.compare.timeline_drawing import FILLS, LEFT, RIGHT, draw_timelines, nice_ticks
from megatron_overlap.tools.launch.run_records import RunRecord, StepExposed
from megatron_overlap.tools.trace.chrome_trace import event_files
from megatron_overlap.tools.trace.timeline import Lane, Span, Timeline, timelines
from megatron_overlap.tracing.events import EventFile, Kind, Trace
from tests.tools.compare.samples import record, side
from tests.tools.trace.test_trace import MS
from tests.tools.trace.test_trace import record as record_events


def traced(times: list[float]) -> RunRecord:
    steps = tuple(StepExposed(20.0, {("gather", "forward"): 20.0}) for _ in times)
    return replace(record(times), exposed=steps)


def compared() -> Comparison:
    """Typical: iteration 4 of round 3 of `plain`, iteration 5 of round 1 of `hidden`."""
    plain = [traced([9, 9, *times]) for times in ([300, 310, 320], [90, 121, 95], [80, 200, 301])]
    hidden = [traced([9, 9, *times]) for times in ([30, 40, 60], [90, 65, 95], [10, 11, 70])]
    return compare([side("plain", plain), side("hidden", hidden)])


def write_step(path: Path, rank: int, iteration: int, waits: list[tuple[float, float]], length: float = 100) -> None:
    """Two steps of `length` ms, rank r beginning r ms late; waits are in the second one, from its start on."""
    path.mkdir(parents=True, exist_ok=True)
    file, trace = EventFile(path / f"events-rank{rank}.bin", rank), Trace(lambda: 0)
    for number in (iteration - 1, iteration):
        at = number * 1000 + rank
        for start, stop in waits if number == iteration else []:
            trace.add(Kind.OTHER_WAIT, round((at + start) * MS), round((at + stop) * MS), op=trace.name("sum forward"))
        trace.add(Kind.STEP, at * MS, round((at + length) * MS), operation=number)
        file.write(trace)
    file.close()


def folder_of(result: Comparison, tmp_path: Path) -> Path:
    """Events of both runs in the folders that a comparison has."""
    for run, waits in zip(result.runs, ([(10.0, 40.0), (-5.0, 2.0)], [(50.0, 55.0)]), strict=True):
        for rank in (0, 1):
            run_dir = run_folder(tmp_path / "runs", run.typical.round, run.name)
            write_step(run_dir, rank, run.typical.iteration, waits)
    return tmp_path


def test_the_step_is_the_one_nearest_the_median(tmp_path: Path) -> None:
    result = compared()
    assert [run.typical for run in result.runs] == [TypicalStep(3, 4, 200), TypicalStep(1, 5, 60)]
    written = comparison_content(result)["runs"]
    assert written[0]["typical_step"] == {"round": 3, "iteration": 4, "step_time_ms": 200}
    found, missing = timelines(result, folder_of(result, tmp_path) / "runs")
    assert missing == []
    assert [one.step for one in found] == [run.typical for run in result.runs]
    assert [one.median_ms for one in found] == [200, 60]
    # What began before the step, and lies in it, counts as far as it lies in it.
    assert found[0].lanes[0].waits == (Span(0, 2, "sum forward"), Span(10, 40, "sum forward"))
    assert found[0].lanes[0].waited_ms == 32
    assert (found[0].lanes[1].start_ms, found[0].lanes[1].stop_ms) == (1, 101)
    assert found[0].lanes[1].waits == (Span(1, 3, "sum forward"), Span(11, 41, "sum forward"))
    assert found[0].clock_error_ns is None


def test_of_two_that_are_as_near_the_earlier_one() -> None:
    result = compare([side("a", [traced([9, 9, 100, 80])]), side("b", [traced([9, 9, 80, 100])])])
    assert [run.typical for run in result.runs] == [TypicalStep(1, 3, 100), TypicalStep(1, 3, 80)]


def test_ranks_are_on_one_clock_and_messages_from_sent_to_landed(tmp_path: Path) -> None:
    """Rank 1's clock is 5 s ahead in the files."""
    result = compare([side(name, [traced([9, 9, 100])]) for name in ("plain", "hidden")])
    runs = [replace(run, typical=TypicalStep(1, 2, 100)) for run in result.runs]
    (tmp_path / "round1-plain").mkdir()
    record_events(tmp_path / "round1-plain")
    (one,), missing = timelines(replace(result, runs=runs), tmp_path)
    assert missing == [f"hidden: {tmp_path / 'round1-hidden'}: no events in it"]
    first, second = one.lanes
    assert first == Lane(0, "", 0, 100, (Span(40, 60, "gather forward"),), (Span(50, 60, "gather forward"),), 20, 10)
    assert second == Lane(1, "", 0, 100, (), (Span(50, 60, "gather forward"),), 0, 10)
    assert one.clock_error_ns == 30_000


def test_of_many_ranks_those_that_matter(tmp_path: Path) -> None:
    result = compare([side(name, [traced([9, 9, 100])]) for name in ("plain", "hidden")])
    for rank in range(6):
        waits = [(10.0, 10.0 + (40 if rank == 4 else 5))]
        write_step(tmp_path / "round1-plain", rank, 3, waits, length=100 + (rank == 2))
        write_step(tmp_path / "round1-hidden", rank, 3, [(0.0, 50.0 - rank)], length=100 - rank)
    found, _ = timelines(result, tmp_path)
    assert [(lane.rank, lane.role) for lane in found[0].lanes] == [(0, "first"), (2, "slowest"), (4, "waited most")]
    assert [(lane.rank, lane.role) for lane in found[1].lanes] == [(0, "first, slowest, waited most")]
    assert {one.num_ranks for one in found} == {6}
    assert "3 of 6 ranks" in draw_timelines(found).strips[0].title


def test_one_axis_for_all_runs() -> None:
    def run(name: str, stop: float, waits: tuple[Span, ...]) -> Timeline:
        lane = Lane(0, "", 0, stop, waits, (), 0, 0)
        return Timeline(name, TypicalStep(1, 3, stop), stop, (lane,), 1, 0)

    waits = (Span(0, 100, "a"), Span(100.0001, 200, "a"), Span(300, 400, "b"))
    drawing = draw_timelines([run("plain", 1000, waits), run("hidden", 500, (Span(250, 500, "b"),))])
    first, second = drawing.strips
    per_ms = (RIGHT - LEFT) / 1000
    assert (first.end, second.end) == (RIGHT, LEFT + 500 * per_ms)
    assert (first.saved, second.saved) == (None, "500 ms less")
    blocks = first.lanes[0].waits
    assert [(block.x, pytest.approx(block.width)) for block in blocks] == [
        (LEFT, 200 * per_ms),  # nobody could see these two apart
        (LEFT + 300 * per_ms, 100 * per_ms),
    ]
    assert second.lanes[0].waits[0].fill == blocks[1].fill == 0  # the same colour in both runs
    assert drawing.legend == (("b", 0), ("a", 1))
    assert second.y > first.bottom
    assert drawing.ticks[0] == (LEFT, "0")


def test_more_ops_than_colours_share_the_last() -> None:
    waits = tuple(Span(10 * place, 10 * place + 10 - place / 10, f"op{place:02}") for place in range(12))
    lane = Lane(0, "", 0, 120, waits, (), 0, 0)
    drawing = draw_timelines([Timeline("plain", TypicalStep(1, 3, 120), 120, (lane,), 1, 0)])
    assert drawing.legend[0] == ("op00", 0)
    assert drawing.legend[-1] == ("all others", len(FILLS) - 1)
    assert len(drawing.legend) == len(FILLS)


def test_an_op_that_hardly_waited_has_no_colour_of_its_own() -> None:
    lane = Lane(0, "", 0, 1000, (Span(0, 100, "a"), Span(200, 201, "b")), (), 0, 0)
    drawing = draw_timelines([Timeline("plain", TypicalStep(1, 3, 1000), 1000, (lane,), 1, 0)])
    assert drawing.legend == (("a", 0), ("all others", len(FILLS) - 1))


@pytest.mark.parametrize(("largest", "last"), [(7, 7), (95, 90), (1234, 1200), (0.4, 0.4), (5500, 5000)])
def test_ticks_are_round(largest: float, last: float) -> None:
    ticks = nice_ticks(largest)
    assert ticks[-1] == pytest.approx(last)
    assert 5 <= len(ticks) <= 11


def test_the_page_has_timeline_and_waterfall(tmp_path: Path) -> None:
    result = compared()
    report.write(result, folder_of(result, tmp_path), {})
    page = (tmp_path / "compare.html").read_text()
    assert "round 3, iteration 4: 200.0 ms, median 200.0 ms" in page
    assert "round 1, iteration 5: 60.0 ms, median 60.0 ms" in page
    assert "<title>waits for sum forward: 30.0 ms from 10.0 ms on</title>" in page
    assert "taken as equal: plain, hidden" in page
    assert "Where the time went" in page
    assert "\N{MINUS SIGN}140.0" in page
    assert "Exposed communication, a step" not in page  # the waterfall has it


def test_runs_without_events_say_how_to_get_them(tmp_path: Path) -> None:
    result = compare([side("a", [record([9, 9, 100])]), side("b", [record([9, 9, 100])])])
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert "No timeline: these runs recorded no events." in page
    assert "compare CONFIG overlap.trace=true" in page
    assert 'class="timeline"' not in page
    only = compare([side("a", [record([9, 9, 100])]), side("b", [traced([9, 9, 100])])])
    assert timelines(only, tmp_path)[1][0] == "a recorded no events; overlap.trace=true does"


def _no_format(data: bytes) -> bytes:
    return b"nothing\n" + data


def _cut(data: bytes) -> bytes:
    return data[:-40]


def _no_names(data: bytes) -> bytes:
    return data.replace(b'["sum forward"]', b"[]             ")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_no_format, "not a file of events of this release"),
        (_cut, "step 4 is not in it: the run has steps 3 to 3"),
        (_no_names, "has an event whose op or group has no name"),
    ],
)
def test_a_damaged_file_costs_one_rank_and_not_the_report(tmp_path: Path, damage, told: str) -> None:
    result = compared()
    folder_of(result, tmp_path)
    path = event_files(tmp_path / "runs" / "round3-plain")[1]
    path.write_bytes(damage(path.read_bytes()))
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert told in page
    assert str(path) in page
    assert page.count(">rank 1</text>") == 1
    assert page.count(">rank 0</text>") == 2
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][0]["name"] == "plain"


def test_when_no_file_can_be_read_there_is_no_drawing(tmp_path: Path) -> None:
    result = compared()
    for path in folder_of(result, tmp_path).glob("runs/*/events-rank*.bin"):
        path.write_bytes(b"")
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert 'class="timeline"' not in page
    assert page.count("not a file of events of this release") == 4
