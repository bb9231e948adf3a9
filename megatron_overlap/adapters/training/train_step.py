"""The patches of Megatron's `train_step` and `evaluate`: they count the session's steps and call recorders."""

from typing import Any

from megatron_overlap.adapters.training.step_recorder import StepRecorder
from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.session import Adapter, Session


class TrainStep(Adapter):
    """The recorders of the training steps of one session, which are called before and after every step."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.recorders: list[StepRecorder] = []


def train_step(original: Method, session: Session) -> Method:
    """Factory of the patch."""
    recorders = session.adapter(TrainStep).recorders

    def run(*args: Any, **kwargs: Any) -> Any:
        iterations_before = kwargs.get("iteration")
        session.next_step(None if iterations_before is None else iterations_before + 1)
        for recorder in recorders:
            recorder.step_begins()
        result = original(*args, **kwargs)
        for recorder in recorders:
            recorder.step_completed(iterations_before, result)
        return result

    return run


def evaluate(original: Method, session: Session) -> Method:
    """Factory of the patch."""
    recorders = session.adapter(TrainStep).recorders

    def run(*args: Any, **kwargs: Any) -> Any:
        for recorder in recorders:
            recorder.evaluation_begins()
        result = original(*args, **kwargs)
        for recorder in recorders:
            recorder.evaluation_completed()
        return result

    return run
