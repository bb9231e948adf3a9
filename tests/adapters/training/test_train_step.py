"""The patches of `train_step` and `evaluate`: step numbers, and the calls of the recorder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_overlap import OverlapConfig, Session
from megatron_overlap.adapters.training.train_step import StepRecorder, evaluate, train_step
from megatron_overlap.tracing import EventFile, Kind, Trace


class Recorder(StepRecorder):
    """Records the calls of the patch."""

    def __init__(self, calls: list[object]) -> None:
        self.calls = calls

    def step_begins(self) -> None:
        self.calls.append("begins")

    def step_completed(self, iterations_before: int | None, result: Any) -> None:
        self.calls.append(("completed", iterations_before, result))

    def start_clock(self) -> None:
        self.calls.append("begins")

    def evaluation_completed(self) -> None:
        self.calls.append("completed")


def test_the_recorder_is_called_around_the_step_and_its_number_follows_megatron() -> None:
    session = Session(OverlapConfig())
    calls: list[object] = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append(("step", session.step, args, kwargs))
        return "losses"

    step = train_step(original, session)
    session.adapter(StepRecorder, lambda session: Recorder(calls))
    assert step("data", iteration=6) == "losses"
    assert calls == [
        "begins",
        ("step", 7, ("data",), {"iteration": 6}),
        ("completed", 6, "losses"),
    ]
    assert step("data") == "losses"
    assert session.step == 8, "without the argument the steps are counted"
    assert calls[-1] == ("completed", None, "losses")


def test_the_recorder_is_called_around_an_evaluation() -> None:
    session = Session(OverlapConfig())
    calls: list[object] = []

    def original(*args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "losses"

    session.adapter(StepRecorder, lambda session: Recorder(calls))
    run = evaluate(original, session)
    assert run("data", verbose=True) == "losses"
    assert calls == ["begins", (("data",), {"verbose": True}), "completed"]


def recorder_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[StepRecorder, Trace]:
    """The recorder of a session with a trace."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(StepRecorder, "_to_writers", lambda *_: None)
    session = Session(OverlapConfig())
    session.trace = Trace()
    recorder = session.adapter(StepRecorder, lambda session: StepRecorder(session, folder, 0, "cpu", None))
    return recorder, session.trace


class FullFile(EventFile):
    """Its disk is full."""

    def write(self, trace: Trace) -> Any:
        trace.take()
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("file", ["events", "steps"])
def test_a_full_disk_ends_the_records_and_not_the_training(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, trace = recorder_in(tmp_path, monkeypatch)
    losses: Any = ({"lm loss": 1.0}, 0, 0, 0, 0, 2.0)
    recorder.start_clock()
    recorder.step_completed(0, losses)
    if file == "events":
        recorder._traced = FullFile(tmp_path / "other", 0), trace
    else:
        recorder._steps = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115

    def rest() -> None:
        for step in (1, 2, 3):
            trace.add(Kind.OP, 1, 2)
            recorder.start_clock()
            recorder.step_completed(step, losses)
        recorder.session.disable()

    with pytest.warns(RuntimeWarning, match=f"rank 0 records no more steps in {tmp_path}: No space left") as told:
        rest()
    assert len(told) == 1
    assert recorder.ended
    assert recorder._iteration == 4, "the clocks are compared before the first step alone"
    assert trace.take()[1] == [], "the events of later steps would fill the memory"


def test_no_report_of_an_earlier_run_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed writes none."""
    for name in ("report", "meta"):
        (tmp_path / f"{name}-rank0.json").write_text("{}")
    recorder, _ = recorder_in(tmp_path, monkeypatch)
    recorder.session.disable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["events-rank0.bin", "steps-rank0.jsonl"]
