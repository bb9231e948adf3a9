"""A training run that records events: the files it writes, and Megatron's log, TensorBoard and W&B."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap import cli
from megatron_overlap.tools.launch.run_records import read_run
from megatron_overlap.tracing import read_events, steps_of
from tests.adapters.megatron_runs import NO_GPU, SCRIPTS, TINY, TP2_SP, start_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run with TensorBoard and Weights & Biases, and the output of its last rank."""
    folder = tmp_path_factory.mktemp("traced")
    writers = ["--tensorboard-dir", str(folder / "board"), "--wandb-save-dir", str(folder)]
    writers += ["--wandb-project", "overlap", "--wandb-exp-name", "traced"]
    argv = [str(SCRIPTS / "pretrain_gpt.py"), *NO_GPU, *TINY, *TP2_SP, *writers]
    argv += ["--overlap-device", "cpu", "--overlap-run-dir", str(folder / "run"), "--overlap-trace"]
    done = start_ranks(2, argv, env={"WANDB_MODE": "offline"})
    assert [one.returncode for one in done] == [0, 0], done[0].stdout[-3000:]
    return folder, done[1].stdout


def test_every_step_has_its_exposed_communication(run: tuple[Path, str]) -> None:
    record = read_run(run[0] / "run", 2, 4)
    assert record.exposed
    for step, time_ms in zip(record.exposed, record.step_time_ms, strict=True):
        assert 0 < step.total_ms < time_ms
        assert any(op == "all_reduce" for op, _ in step.by_op)  # Megatron's own
        assert sum(step.by_op.values()) == pytest.approx(step.total_ms)
    # A step lists only operations with exposed time.
    assert {"all_gather_linear", "linear_reduce_scatter"} & {op for step in record.exposed for op, _ in step.by_op}
    for rank in (0, 1):
        found = read_events(run[0] / "run" / f"events-rank{rank}.bin")
        assert [number for number, _, _ in steps_of(found)] == [1, 2, 3, 4]
        assert len(found.marks) == 2
        assert found.whole


def test_the_log_line_has_the_exposed_communication(run: tuple[Path, str]) -> None:
    lines = [line for line in run[1].splitlines() if "elapsed time per iteration (ms):" in line]
    rows = _rows(run[0])
    assert len(lines) == len(rows) == 4
    for line, row in zip(lines, rows, strict=True):
        assert f"exposed communication (ms): {row['exposed']['total_ms']:.1f} |" in line


def test_tensorboard_has_the_series(run: tuple[Path, str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(run[0] / "board"))
    board.Reload()
    rows = _rows(run[0])
    values = [(point.step, point.value) for point in board.Scalars("exposed communication/total ms")]
    assert values == [(row["iteration"], pytest.approx(row["exposed"]["total_ms"], rel=1e-5)) for row in rows]
    shown = {f"exposed communication/{op} {way} ms" for row in rows for op, way, _ in row["exposed"]["ops"]}
    assert shown
    assert shown < set(board.Tags()["scalars"])


def test_weights_and_biases_has_the_series(run: tuple[Path, str]) -> None:
    (file,) = run[0].glob("wandb/offline-run-*/run-*.wandb")
    history = _history(file)
    for row in _rows(run[0]):
        shown = history[row["iteration"]]
        exposed = row["exposed"]
        assert shown["exposed communication/total ms"] == pytest.approx(exposed["total_ms"])
        assert shown["exposed communication/share of step"] == pytest.approx(exposed["total_ms"] / row["step_time_ms"])
        for op, way, time_ms in exposed["ops"]:
            assert shown[f"exposed communication/{op} {way} ms"] == pytest.approx(time_ms)
        assert "lm loss" in shown  # Megatron's series, in the same row


def test_the_trace_command_reads_the_run(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(run[0] / "run")]) == 0
    assert "clock error of all ranks" in capsys.readouterr().out


def test_trace_without_a_run_folder_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "overlap.yaml"
    config.write_text("overlap: {trace: true}\n")
    (done,) = start_ranks(1, [str(SCRIPTS / "pretrain_gpt.py"), "--overlap-config", str(config)], timeout_s=60)
    assert done.returncode == 2
    assert "--overlap-trace: true: needs --overlap-run-dir" in done.stdout


def _rows(folder: Path) -> list[dict[str, Any]]:
    """The recorded steps of the last rank."""
    return [json.loads(line) for line in (folder / "run" / "steps-rank1.jsonl").read_text().splitlines()]


def _history(file: Path) -> dict[int, dict[str, Any]]:
    """The history of an offline run of Weights & Biases, by step."""
    from wandb.proto.wandb_internal_pb2 import Record

    history: dict[int, dict[str, Any]] = {}
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        for item in record.history.item:
            key = item.key or "/".join(item.nested_key)
            history.setdefault(record.history.step.num, {})[key] = json.loads(item.value_json)
    return history


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, the file format of Weights & Biases: parts with checksum, length and kind."""
    block, header, end = 32768, struct.Struct("<IHB"), (1, 4)  # whole, or the last part
    at, record = header.size, b""  # after the header of the file
    while at < len(data):
        if block - at % block < header.size:
            at += block - at % block
            continue
        _, length, kind = header.unpack_from(data, at)
        at += header.size
        record += data[at : at + length]
        at += length
        if kind in end:
            yield record
            record = b""
