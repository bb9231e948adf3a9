"""The file of events, and what is exposed by them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.tracing import (
    EventFile,
    EventFileError,
    Kind,
    Mark,
    Trace,
    direction_of,
    exposed_in,
    read_events,
    steps_of,
)

MS = 1_000_000


def traced(times: list[tuple[Kind, str, float, float]]) -> Trace:
    trace = Trace()
    for kind, op, start, stop in times:
        trace.add(kind, round(start * MS), round(stop * MS), op=trace.name(op))
    return trace


def written(path: Path) -> Path:
    """Two steps with a wait each, and two marks."""
    file = EventFile(path, 3)
    trace = traced([(Kind.WAIT, "gather", 1, 3)])
    trace.add(Kind.STEP, 0, 10 * MS, operation=7)
    file.write(trace)
    file.mark(Mark(5, -6, 7))
    trace.add(Kind.COLLECTIVE_WAIT, 12 * MS, 15 * MS, op=trace.name("all_reduce forward"))
    trace.add(Kind.STEP, 10 * MS, 20 * MS, operation=8)
    file.write(trace)
    file.close()
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    found = read_events(written(tmp_path / "events-rank3.bin"))
    assert (found.rank, found.whole, found.marks) == (3, True, [Mark(5, -6, 7)])
    assert steps_of(found) == [(7, 0, 10 * MS), (8, 10 * MS, 20 * MS)]
    assert [exposed_in(found, start, stop).total_ms for _, start, stop in steps_of(found)] == [2, 3]
    assert exposed_in(found, 10 * MS, 20 * MS).by_op == {("all_reduce", "forward"): 3}


def test_a_file_that_is_cut_is_read_up_to_there(tmp_path: Path) -> None:
    path = written(tmp_path / "events")
    whole = path.read_bytes()
    steps = set()
    for size in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:size])
        found = read_events(path)
        steps.add(tuple(number for number, _, _ in steps_of(found)))
        assert found.whole == (size in [whole.index(b"\n") + 1, *ends(whole)])
    assert steps == {(), (7,)}


def ends(data: bytes) -> list[int]:
    """Where a block or mark ends."""
    first = data.index(b'{"clock"')
    second = data.index(b'{"names"', first)
    return [first, second]


@pytest.mark.parametrize("content", [b"", b"\x00\x01\n", b"[1]\n", b'{"format": "another"}\n'])
def test_another_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "events-rank0.bin"
    path.write_bytes(content)
    with pytest.raises(EventFileError, match="events-rank0.bin: not a file of events"):
        read_events(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(EventFileError, match="No such file"):
        read_events(tmp_path / "none")


def test_waits_at_once_count_once_and_only_inside(tmp_path: Path) -> None:
    trace = traced(
        [(Kind.WAIT, "a", -5, 2), (Kind.WAIT, "b dgrad", 1, 4), (Kind.OP, "a", 0, 9), (Kind.WAIT, "a", 8, 99)]
    )
    file = EventFile(tmp_path / "events", 0)
    found = exposed_in(file.write(trace), 0, 10 * MS)
    file.close()
    assert found.total_ms == 4 + 2
    assert found.by_op == {("a", "forward"): 4, ("b", "dgrad"): 3}


@pytest.mark.parametrize(
    ("op", "told"),
    [
        ("all_gather_linear", ("all_gather_linear", "forward")),
        ("all_gather_linear dgrad", ("all_gather_linear", "dgrad")),
        ("gradient reduce-scatter", ("gradient reduce-scatter", "-")),
        ("all_reduce backward", ("all_reduce", "backward")),
    ],
)
def test_directions(op: str, told: tuple[str, str]) -> None:
    assert direction_of(op) == told
