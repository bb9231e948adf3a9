"""Records the events of each training step and adds the exposed communication to Megatron's logs."""

import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.comm.host_group import compare_clocks
from megatron_overlap.session import Adapter, Session
from megatron_overlap.tracing.collective_waits import timed_wait
from megatron_overlap.tracing.events import EventFile, Exposed, Kind, Trace, exposed_in

EVENTS = "events-rank{rank}.bin"

_LOGGED = "elapsed time per iteration (ms):"
_SERIES = "exposed communication"


def print_rank_last(original: Method, session: Session) -> Method:
    """Factory of a patch: Megatron's log line of an iteration also has the exposed communication."""
    tracer = session.find(StepTracer)
    assert tracer is not None

    def run(message: Any) -> None:
        original(f"{message}{tracer.log_text()}" if _LOGGED in str(message) else message)

    return run


def collective_wait(original: Method, session: Session) -> Method:
    """Factory of a patch: every wait for a collective of torch.distributed is timed."""
    tracer = session.find(StepTracer)
    assert tracer is not None
    return timed_wait(original, tracer.trace)


class StepTracer(Adapter):
    """Writes `events-rank{r}.bin` into `run_dir`, one block per step.

    Args:
        session: the session; closes the file.
        run_dir: folder to write to.
        rank: global rank, in the file's name.
        device: "cpu" or "cuda".

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, session: Session, run_dir: Path, rank: int, device: str) -> None:
        super().__init__(session)
        self.trace = Trace()
        self._file = EventFile(run_dir / EVENTS.format(rank=rank), rank, {"device": device})
        self._since_log: list[tuple[float, float]] = []

    def compare_clocks(self) -> None:
        """Records the offset to rank 0's clock; collective. Without an answer the clocks count as equal."""
        world = dist.group.WORLD
        if world is None:  # the script destroyed the process groups
            return
        try:
            self._file.mark(compare_clocks(world))
        except RuntimeError as error:
            warnings.warn(f"trace: the ranks' clocks could not be compared: {error}", stacklevel=2)

    def step(self, iteration: int, start_ns: int, stop_ns: int) -> dict[str, Any]:
        """Writes the events of a step; returns its exposed communication as JSON can hold it."""
        self.trace.add(Kind.STEP, start_ns, stop_ns, operation=iteration)
        exposed = exposed_in(self._file.write(self.trace), start_ns, stop_ns)
        share = exposed.total_ms / ((stop_ns - start_ns) / 1e6)
        self._since_log.append((exposed.total_ms, share))
        self._to_writers(iteration, exposed, share)
        return {
            "total_ms": exposed.total_ms,
            "ops": [[op, direction, time_ms] for (op, direction), time_ms in exposed.by_op.items()],
        }

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def log_text(self) -> str:
        """The fields for Megatron's log line: means over the steps since the last line, on the rank that prints it."""
        if not self._since_log:
            return ""
        time_ms, share = (sum(values) / len(values) for values in zip(*self._since_log, strict=True))
        self._since_log.clear()
        return f" {_SERIES} (ms): {time_ms:.1f} | exposed share of step: {share:.1%} |"

    def _to_writers(self, iteration: int, exposed: Exposed, share: float) -> None:
        """Writes to TensorBoard and Weights & Biases where Megatron enables them, which is on its last rank."""
        from megatron.training import get_args
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if (board is None and wandb is None) or iteration % get_args().tensorboard_log_interval:
            return
        series = {f"{_SERIES}/total ms": exposed.total_ms, f"{_SERIES}/share of step": share}
        series |= {f"{_SERIES}/{op} {direction} ms": value for (op, direction), value in exposed.by_op.items()}
        for name, value in series.items():
            if board is not None:
                board.add_scalar(name, value, iteration)
        if wandb is not None:
            wandb.log(series, iteration)
