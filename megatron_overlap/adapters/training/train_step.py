"""The patch of Megatron's `train_step`: counts the session's steps and calls observers before and after each step."""

from typing import Any, Protocol

from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.session import Adapter, Session


class StepObserver(Protocol):
    """An object that is called before and after every training step."""

    def step_begins(self) -> None:
        """Called before the step."""

    def step_completed(self, iterations_before: int | None, result: Any) -> None:
        """Called after the step.

        Args:
            iterations_before: iterations completed before this step, as Megatron passes them; None if it does not.
            result: the result of `train_step`.
        """


class TrainStep(Adapter):
    """The observers of the training steps of one session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.observers: list[StepObserver] = []


def train_step(original: Method, session: Session) -> Method:
    """Factory of the patch."""
    observers = session.adapter(TrainStep).observers

    def run(*args: Any, **kwargs: Any) -> Any:
        iterations_before = kwargs.get("iteration")
        session.next_step(None if iterations_before is None else iterations_before + 1)
        for observer in observers:
            observer.step_begins()
        result = original(*args, **kwargs)
        for observer in observers:
            observer.step_completed(iterations_before, result)
        return result

    return run
