"""The patches of `train_step` and `evaluate`: step numbers, and the calls of the recorder."""

from __future__ import annotations

from typing import Any

from megatron_overlap import OverlapConfig, Session
from megatron_overlap.adapters.training.train_step import StepRecorder, evaluate, train_step


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
