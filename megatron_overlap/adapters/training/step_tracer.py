"""Records the events of each training step, and shows what of its communication was exposed where Megatron logs.

Seams: ``print_rank_last`` in the module of Megatron's training loop, through which the line of an iteration goes, and
the writers that Megatron made for TensorBoard and Weights & Biases. Both are the same in 0.16.1 to 0.19.2.
"""

import functools
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_overlap.comm.clock_sync import compare_clocks
from megatron_overlap.tracing.collective_waits import CollectiveWaits
from megatron_overlap.tracing.events import EventFile, Kind, Trace
from megatron_overlap.tracing.exposed import Exposed, exposed_in

EVENTS = "events-rank{rank}.bin"

_LOGGED = "elapsed time per iteration (ms):"
_SERIES = "exposed communication"


class StepTracer:
    """Writes ``events-rank{r}.bin`` into ``run_dir``, a block a step.

    Args:
        run_dir: folder to write to.
        rank: global rank, in the file's name.
        device: "cpu" or "cuda".

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, run_dir: Path, rank: int, device: str) -> None:
        self.trace = Trace()
        self._file = EventFile(run_dir / EVENTS.format(rank=rank), rank, {"device": device})
        self._waits = CollectiveWaits(self.trace) if device == "cpu" else None
        self._since_log: list[tuple[float, float]] = []

    def install(self) -> None:
        """Begins to time waits for collectives, and adds to Megatron's log."""
        from megatron.training import training

        if self._waits is not None:
            self._waits.install()
        original = training.print_rank_last

        @functools.wraps(original)
        def print_rank_last(message: Any) -> None:
            original(f"{message}{self._log_text()}" if _LOGGED in str(message) else message)

        training.print_rank_last = print_rank_last

    def compare_clocks(self) -> None:
        """Notes where rank 0's clock stands; every rank calls it. Without an answer the clocks are taken as equal."""
        world = dist.group.WORLD
        if world is None:  # a script may have ended torch.distributed itself
            return
        try:
            self._file.mark(compare_clocks(world))
        except RuntimeError as error:
            warnings.warn(f"trace: the ranks' clocks could not be compared: {error}", stacklevel=2)

    def step(self, iteration: int, start_ns: int, stop_ns: int) -> dict[str, Any]:
        """Writes a step's events; what of its communication was exposed, as JSON can hold it."""
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
        """Ends the file, and the timing of waits."""
        if self._waits is not None:
            self._waits.remove()
        self._file.close()

    def _log_text(self) -> str:
        """For Megatron's line: the mean over the steps since the last one, on the rank that prints it."""
        if not self._since_log:
            return ""
        time_ms, share = (sum(values) / len(values) for values in zip(*self._since_log, strict=True))
        self._since_log.clear()
        return f" {_SERIES} (ms): {time_ms:.1f} | exposed share of step: {share:.1%} |"

    def _to_writers(self, iteration: int, exposed: Exposed, share: float) -> None:
        """To TensorBoard and Weights & Biases, where Megatron has them on: its last rank."""
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
