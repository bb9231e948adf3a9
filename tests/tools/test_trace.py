"""The trace of a run: all ranks on one clock, and no events of one row overlap."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap import cli
from megatron_overlap.tools.trace import align_steps, clock_error_ns, trace_events
from megatron_overlap.tracing import EventFile, Kind, Mark, Trace, read_events

MS = 1_000_000
AHEAD = 5000 * MS


def record(folder: Path, *, ahead: int = AHEAD, drift: float = 0.0) -> list[Path]:
    """Two ranks, two steps of 100 ms. The clock of rank 1 is ahead and runs faster by `drift`.

    Rank 0 waits from 40 to 60 ms of each step for a message that rank 1 sends at 50 ms.
    """
    return [_record(folder / f"events-rank{rank}.bin", rank, ahead * rank, drift * rank) for rank in (0, 1)]


def _record(path: Path, rank: int, ahead: int, drift: float) -> Path:
    file, trace = EventFile(path, rank), Trace(lambda: 0)
    group, gather, scatter = trace.name("ranks 0,1"), trace.name("gather"), trace.name("scatter dgrad")

    def shown(ms: float) -> int:
        return ahead + round(ms * (1 + drift) * MS)

    def mark(ms: float) -> None:
        file.mark(Mark(shown(ms), round(ms * MS) - shown(ms), 30_000))

    mark(100)
    for number in (1, 2):
        at = 100 * number
        kinds = [(Kind.OP, 20, 70, gather), (Kind.OP, 30, 65, scatter), (Kind.SENT, 50, 50, gather)]
        kinds += [(Kind.RECEIVED, 20, 60, gather), *([(Kind.WAIT, 40, 60, gather)] if rank == 0 else [])]
        for kind, start, stop, op in kinds:
            times = (shown(at + start), shown(at + stop))
            trace.add(kind, *times, op=op, group=group, operation=number, peer=1 - rank, num_bytes=8)
        trace.add(Kind.STEP, shown(at), shown(at + 100), operation=number)
        file.write(trace)
    mark(300)
    file.close()
    return path


def rows(events: list[dict[str, Any]]) -> dict[tuple[int, str], list[tuple[str, float, float]]]:
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            times = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
            found[event["pid"], names[event["pid"], event["tid"]]].append((event["name"], *times))
    return found


@pytest.mark.parametrize("drift", [0.0, 1e-3])
def test_all_ranks_on_one_clock(tmp_path: Path, drift: float) -> None:
    found = rows(
        list(trace_events(align_steps([read_events(path) for path in record(tmp_path, drift=drift)], None, None)))
    )
    for rank in (0, 1):
        assert found[rank, "steps"] == [("step 1", 0, 100), ("step 2", 100, 200)]
        assert found[rank, f"from rank {1 - rank} (ranks 0,1)"] == [
            ("gather", pytest.approx(50), pytest.approx(60)),
            ("gather", pytest.approx(150), pytest.approx(160)),
        ]
    assert found[0, "waits (exposed communication)"] == [("gather", 40, 60), ("gather", 140, 160)]
    assert found[0, "compute"] == [
        ("compute", at, at + length) for at, length in ((0, 40), (60, 40), (100, 40), (160, 40))
    ]
    assert found[0, "ops"] == [("gather", 20, 70), ("gather", 120, 170)]
    assert found[0, "ops, 1 more at once"][0] == ("scatter dgrad", 30, 65)
    for slices in found.values():
        assert all(a[2] <= b[1] for a, b in zip(slices, slices[1:], strict=False)), slices


def test_a_message_starts_after_the_previous_one_is_received(tmp_path: Path) -> None:
    """Two messages sent at once do not overlap: the second starts when the first is received."""
    file, trace = EventFile(tmp_path / "events-rank0.bin", 0), Trace(lambda: 0)
    for message, stop in ((0, 30), (1, 50)):
        trace.add(Kind.RECEIVED, 10 * MS, stop * MS, op=trace.name("gather"), message=message, peer=1)
    trace.add(Kind.STEP, 0, 60 * MS, operation=1)
    file.write(trace)
    file.close()
    events = list(trace_events(align_steps([read_events(tmp_path / "events-rank0.bin")], None, None)))
    assert rows(events)[0, "from rank 1 (gather)"] == [("gather", 10, 30), ("gather", 30, 50)]


def test_a_clock_without_marks_has_an_unknown_error(tmp_path: Path) -> None:
    file = EventFile(tmp_path / "events", 4)
    file.close()
    assert clock_error_ns(read_events(tmp_path / "events")) is None


def test_the_command_writes_a_chrome_trace_and_prints_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = record(tmp_path)
    paths[0].with_suffix(".old.bin").write_bytes(b"of another run")
    assert cli.main(["trace", str(tmp_path), "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.split()[:1] == ["gather"])
    assert row == ["gather", "forward", "10.00", "20.00", "0"]
    assert "clock error of all ranks: at most 30 us" in printed
    content = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    assert {e["name"] for e in content["traceEvents"] if e["ph"] == "X" and e["tid"] == 0} == {"step 2"}
    out = tmp_path / "plain.json"
    assert cli.main(["trace", str(tmp_path), "--output", str(out)]) == 0
    assert len(json.loads(out.read_text())["traceEvents"]) > len(content["traceEvents"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "none: no such folder; run with overlap.trace=true"),
        (["empty"], "empty: no events in it; run with overlap.trace=true"),
        (["broken"], "not a file of events of this release"),
        (["damaged"], "events-rank0.bin: an event refers to an unknown name: the file is damaged"),
        (["good", "--steps", "7:9"], "--steps: 7:9: the run has steps 1 to 2"),
        (["good", "--steps", ":"], "write FIRST:LAST"),
        (["good", "--steps", "2:1"], "--steps: 2:1: the first step is greater than the last one"),
        (["good", "--output", "none/x.json"], "No such file or directory; give a path that can be written"),
    ],
)
def test_a_wrong_request_is_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "broken", "damaged", "good"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "events-rank0.bin").write_bytes(b"nothing\n")
    record(tmp_path / "good")
    damaged = record(tmp_path / "damaged")[0]
    damaged.write_bytes(
        re.sub(rb'\["ranks 0,1"[^]]*\]', lambda names: b"[]".ljust(len(names[0])), damaged.read_bytes())
    )
    assert cli.main(["trace", *arguments]) == 2
    printed = capsys.readouterr().err
    assert len(printed.splitlines()) == 1
    assert message in printed


def test_missing_ranks_and_incomplete_files_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = record(tmp_path)
    paths[0].rename(tmp_path / "other.bin")
    paths[1].write_bytes(paths[1].read_bytes()[:-5])
    assert cli.main(["trace", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "no events of ranks 0" in printed
    assert "rank 1: its file ends in the middle of a step" in printed
