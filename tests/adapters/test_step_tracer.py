"""A real training run that records events: what it writes, and where Megatron shows it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.events import read_events, steps_of
from megatron_overlap.launch.artefacts import read_run
from tests.adapters.megatron_runs import NO_GPU, SCRIPTS, TINY, TP2_SP, start_ranks

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run with TensorBoard and Weights & Biases, and what its last rank printed."""
    folder = tmp_path_factory.mktemp("traced")
    writers = ["--tensorboard-dir", str(folder / "board")]
    argv = [str(SCRIPTS / "pretrain_gpt.py"), *NO_GPU, *TINY, *TP2_SP, *writers]
    argv += ["--overlap-device", "cpu", "--overlap-run-dir", str(folder / "run"), "--overlap-trace"]
    done = start_ranks(2, argv)
    assert [one.returncode for one in done] == [0, 0], done[0].stdout[-3000:]
    return folder, done[1].stdout


def test_every_step_has_what_was_exposed(run: tuple[Path, str]) -> None:
    record = read_run(run[0] / "run", 2, 4)
    assert record.exposed is not None
    for step, time_ms in zip(record.exposed, record.step_time_ms, strict=True):
        assert 0 < step.total_ms < time_ms
        assert any(op == "all_reduce" for op, _ in step.by_op)  # Megatron's own
        assert sum(step.by_op.values()) == pytest.approx(step.total_ms)
    # What has nothing exposed in a step is not listed in it.
    assert {"all_gather_linear", "linear_reduce_scatter"} & {op for step in record.exposed for op, _ in step.by_op}
    for rank in (0, 1):
        found = read_events(run[0] / "run" / f"events-rank{rank}.bin")
        assert [number for number, _, _ in steps_of(found)] == [1, 2, 3, 4]
        assert len(found.marks) == 2
        assert found.whole


def test_the_log_line_says_it(run: tuple[Path, str]) -> None:
    lines = [line for line in run[1].splitlines() if "elapsed time per iteration (ms):" in line]
    rows = [json.loads(line) for line in (run[0] / "run" / "steps-rank1.jsonl").read_text().splitlines()]
    assert len(lines) == len(rows) == 4
    for line, row in zip(lines, rows, strict=True):
        assert f"exposed communication (ms): {row['exposed']['total_ms']:.1f} |" in line


def test_tensorboard_has_the_series(run: tuple[Path, str]) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = events.EventAccumulator(str(run[0] / "board"))
    board.Reload()
    rows = [json.loads(line) for line in (run[0] / "run" / "steps-rank1.jsonl").read_text().splitlines()]
    values = [(point.step, point.value) for point in board.Scalars("exposed communication/total ms")]
    assert values == [(row["iteration"], pytest.approx(row["exposed"]["total_ms"], rel=1e-5)) for row in rows]
    shown = {f"exposed communication/{op} {way} ms" for row in rows for op, way, _ in row["exposed"]["ops"]}
    assert shown
    assert shown < set(board.Tags()["scalars"])


def test_the_run_makes_a_trace(run: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", str(run[0] / "run")]) == 0
    assert "clocks of all ranks agree" in capsys.readouterr().out


def test_events_need_a_folder(tmp_path: Path) -> None:
    config = tmp_path / "overlap.yaml"
    config.write_text("overlap: {trace: true}\n")
    (done,) = start_ranks(1, [str(SCRIPTS / "pretrain_gpt.py"), "--overlap-config", str(config)], timeout_s=60)
    assert done.returncode == 2
    assert "--overlap-trace: needs --overlap-run-dir" in done.stdout
