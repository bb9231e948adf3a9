"""The step of each run that the report draws, on one clock; and a report with damaged or missing event files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_overlap.tools.compare import report
from megatron_overlap.tools.compare.comparison import Comparison, TypicalStep, compare, comparison_content
from megatron_overlap.tools.compare.plot import OP_STYLES, draw_breakdown, draw_timelines, op_styles
from megatron_overlap.tools.compare.rounds import run_folder
from megatron_overlap.tools.compare.traced_steps import RankStep, Span, StepTimeline, breakdowns, timelines
from megatron_overlap.tools.launch.run_records import RunRecord, StepExposed
from megatron_overlap.tools.trace import event_files
from megatron_overlap.tracing import EventFile, Kind, Trace
from tests.tools.compare.samples import record, side
from tests.tools.compare.test_report import pictures
from tests.tools.test_trace import MS
from tests.tools.test_trace import record as record_events


def traced(times: list[float]) -> RunRecord:
    steps = tuple(StepExposed(20.0, {("gather", "forward"): 20.0}) for _ in times)
    return replace(record(times), exposed=steps)


def compared() -> Comparison:
    """Typical: iteration 4 of round 3 of `plain`, iteration 5 of round 1 of `hidden`."""
    plain = [traced([9, 9, *times]) for times in ([300, 310, 320], [90, 121, 95], [80, 200, 301])]
    hidden = [traced([9, 9, *times]) for times in ([30, 40, 60], [90, 65, 95], [10, 11, 70])]
    return compare([side("plain", plain), side("hidden", hidden)])


def write_step(path: Path, rank: int, iteration: int, waits: list[tuple[float, float]], length: float = 100) -> None:
    """Two steps of `length` ms; rank r starts r ms late. The waits are in the second step, relative to its start."""
    path.mkdir(parents=True, exist_ok=True)
    file, trace = EventFile(path / f"events-rank{rank}.bin", rank), Trace(lambda: 0)
    for number in (iteration - 1, iteration):
        at = number * 1000 + rank
        for start, stop in waits if number == iteration else []:
            trace.add(
                Kind.COLLECTIVE_WAIT, round((at + start) * MS), round((at + stop) * MS), op=trace.name("sum forward")
            )
        trace.add(Kind.STEP, at * MS, round((at + length) * MS), operation=number)
        file.write(trace)
    file.close()


def folder_of(result: Comparison, tmp_path: Path) -> Path:
    """Events of both runs in the folders of a comparison."""
    for run, waits in zip(result.runs, ([(10.0, 40.0), (-5.0, 2.0)], [(50.0, 55.0)]), strict=True):
        for rank in (0, 1):
            run_dir = run_folder(tmp_path / "runs", run.typical_step.round, run.name)
            write_step(run_dir, rank, run.typical_step.iteration, waits)
    return tmp_path


def test_the_step_is_the_one_nearest_the_median(tmp_path: Path) -> None:
    result = compared()
    assert [run.typical_step for run in result.runs] == [TypicalStep(3, 4, 200), TypicalStep(1, 5, 60)]
    written = comparison_content(result)["runs"]
    assert written[0]["typical_step"] == {"round": 3, "iteration": 4, "step_time_ms": 200}
    found, missing = timelines(result, folder_of(result, tmp_path) / "runs")
    assert missing == []
    assert [one.run for one in found] == result.runs
    assert [one.run.step_time_ms.median for one in found] == [200, 60]
    # A wait that begins before the step counts from the start of the step.
    assert found[0].ranks[0].waits == (Span(0, 2, "sum forward"), Span(10, 40, "sum forward"))
    assert found[0].ranks[0].waited_ms == 32
    assert (found[0].ranks[1].start_ms, found[0].ranks[1].stop_ms) == (1, 101)
    assert found[0].ranks[1].waits == (Span(1, 3, "sum forward"), Span(11, 41, "sum forward"))
    assert found[0].clock_error_ns is None


def test_of_two_steps_equally_near_the_median_the_earlier_one_is_typical() -> None:
    result = compare([side("a", [traced([9, 9, 100, 80])]), side("b", [traced([9, 9, 80, 100])])])
    assert [run.typical_step for run in result.runs] == [TypicalStep(1, 3, 100), TypicalStep(1, 3, 80)]


def test_ranks_are_on_one_clock_and_messages_last_from_sending_to_receipt(tmp_path: Path) -> None:
    """The clock of rank 1 is 5 s ahead in the files."""
    result = compare([side(name, [traced([9, 9, 100])]) for name in ("plain", "hidden")])
    runs = [replace(run, typical_step=TypicalStep(1, 2, 100)) for run in result.runs]
    (tmp_path / "round1-plain").mkdir()
    record_events(tmp_path / "round1-plain")
    (one,), missing = timelines(replace(result, runs=runs), tmp_path)
    assert missing == [f"hidden: {tmp_path / 'round1-hidden'}: no events in it"]
    first, second = one.ranks
    assert first == RankStep(
        rank=0,
        role="",
        start_ms=0,
        stop_ms=100,
        waits=(Span(40, 60, "gather forward"),),
        messages=(Span(50, 60, "gather forward"),),
        waited_ms=20,
        receiving_ms=10,
    )
    assert second == replace(first, rank=1, waits=(), waited_ms=0)
    assert one.clock_error_ns == 30_000


def test_of_many_ranks_first_slowest_and_longest_wait_are_shown(tmp_path: Path) -> None:
    result = compare([side(name, [traced([9, 9, 100])]) for name in ("plain", "hidden")])
    for rank in range(6):
        waits = [(10.0, 10.0 + (40 if rank == 4 else 5))]
        write_step(tmp_path / "round1-plain", rank, 3, waits, length=100 + (rank == 2))
        write_step(tmp_path / "round1-hidden", rank, 3, [(0.0, 50.0 - rank)], length=100 - rank)
    found, _ = timelines(result, tmp_path)
    assert [(rank.rank, rank.role) for rank in found[0].ranks] == [(0, "first"), (2, "slowest"), (4, "longest wait")]
    assert [(rank.rank, rank.role) for rank in found[1].ranks] == [(0, "first, slowest, longest wait")]
    assert {one.num_ranks for one in found} == {6}
    assert "; 3 of 6 ranks<" in draw_timelines(found).decode()


def timeline_of(name: str, stop_ms: float, waits: tuple[Span, ...]) -> StepTimeline:
    rank = RankStep(rank=0, role="", start_ms=0, stop_ms=stop_ms, waits=waits, messages=(), waited_ms=0, receiving_ms=0)
    run = compare([side(name, [record([9, 9, stop_ms])]), side("other", [record([9, 9, stop_ms])])]).runs[0]
    return StepTimeline(run, (rank,), num_ranks=1, clock_error_ns=0)


def test_all_runs_are_on_one_axis_with_one_style_for_each_op() -> None:
    plain = timeline_of("plain", 1000, (Span(0, 100, "a"), Span(300, 400, "b")))
    hidden = timeline_of("hidden", 500, (Span(250, 500, "b"),))
    assert op_styles([plain, hidden]) == {"b": 0, "a": 1}
    picture = draw_timelines([plain, hidden]).decode()
    assert picture.count(">500.0 ms less<") == 1
    assert ">1000<" in picture  # the axis of both ends with the longer step
    for op in ("b", "a"):
        assert picture.count(f">wait: {op}<") == 1


def test_more_ops_than_styles_share_the_last_one() -> None:
    waits = tuple(Span(10 * place, 10 * place + 10 - place / 10, f"op{place:02}") for place in range(12))
    found = [timeline_of("plain", 120, waits)]
    assert list(op_styles(found)) == [f"op{place:02}" for place in range(len(OP_STYLES) - 1)]
    assert ">wait: all other ops<" in draw_timelines(found).decode()


def test_an_op_with_a_very_short_wait_shares_the_last_style() -> None:
    found = [timeline_of("plain", 1000, (Span(0, 100, "a"), Span(200, 201, "b")))]
    assert op_styles(found) == {"a": 0}
    assert ">wait: all other ops<" in draw_timelines(found).decode()


def test_the_page_has_timeline_and_breakdown(tmp_path: Path) -> None:
    result = compared()
    report.write(result, folder_of(result, tmp_path), {})
    page = (tmp_path / "compare.html").read_text()
    _, timeline, breakdown = pictures(page)
    assert ">plain: round 3, iteration 4: 200.0 ms, median 200.0 ms<" in timeline
    assert ">hidden: round 1, iteration 5: 60.0 ms, median 60.0 ms<" in timeline
    assert timeline.count(">waits 32.0 ms<") == 2
    assert ">wait: sum forward<" in timeline
    assert "assumed equal: plain, hidden" in page
    assert "Breakdown of the step time" in page
    assert "\N{MINUS SIGN}140.0" in page
    for label in ("step of plain", "gather forward", "step of hidden"):
        assert f">{label}<" in breakdown


def test_the_axis_of_a_breakdown_holds_the_longest_bar() -> None:
    slower = compare([side("plain", [traced([9, 9, 50])]), side("hidden", [traced([9, 9, 90])])])
    picture = draw_breakdown(breakdowns(slower)[0]).decode()
    assert "> 90.0 ms<" in picture
    assert "> +40.0<" in picture
    assert ">80<" in picture  # a tick beyond the step of the reference


def test_the_report_of_runs_without_events_names_the_option(tmp_path: Path) -> None:
    result = compare([side("a", [record([9, 9, 100])]), side("b", [record([9, 9, 100])])])
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert "No timeline: these runs recorded no events." in page
    assert "compare CONFIG overlap.trace=true" in page
    assert 'class="timeline"' not in page
    only = compare([side("a", [record([9, 9, 100])]), side("b", [traced([9, 9, 100])])])
    assert timelines(only, tmp_path)[1][0] == "a recorded no events; set overlap.trace=true to record them"


def _no_format(data: bytes) -> bytes:
    return b"nothing\n" + data


def _cut(data: bytes) -> bytes:
    return data[:-40]


def _no_names(data: bytes) -> bytes:
    return data.replace(b'["sum forward"]', b"[]             ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_no_format, "not a file of events of this release"),
        (_cut, "step 4 is not in it: the run has steps 3 to 3"),
        (_no_names, "an event refers to an unknown name"),
    ],
)
def test_a_damaged_file_removes_one_rank_from_the_report(
    tmp_path: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    result = compared()
    folder_of(result, tmp_path)
    path = event_files(tmp_path / "runs" / "round3-plain")[1]
    path.write_bytes(damage(path.read_bytes()))
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert message in page
    assert str(path) in page
    timeline = pictures(page)[1]
    assert timeline.count(">rank 1<") == 1
    assert timeline.count(">rank 0<") == 2
    assert json.loads((tmp_path / "compare.json").read_text())["runs"][0]["name"] == "plain"


def test_without_readable_files_the_report_has_no_timeline(tmp_path: Path) -> None:
    result = compared()
    for path in folder_of(result, tmp_path).glob("runs/*/events-rank*.bin"):
        path.write_bytes(b"")
    report.write(result, tmp_path, {})
    page = (tmp_path / "compare.html").read_text()
    assert 'class="timeline"' not in page
    assert page.count("not a file of events of this release") == 4
