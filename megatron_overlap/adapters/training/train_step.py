"""Records of the training steps of a rank, through the patches of Megatron's `train_step`, `evaluate` and log."""

import functools
import json
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType
from typing import IO, Any

import torch
import torch.distributed as dist

from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.comm.host_group import compare_clocks
from megatron_overlap.session import Adapter, Session, installed_release, installed_versions
from megatron_overlap.tracing import EventFile, Exposed, Kind, Trace, exposed_in
from megatron_overlap.version import __version__

_LOGGED = "elapsed time per iteration (ms):"
_SERIES = "exposed communication"


def print_rank_last(original: Method, session: Session) -> Method:
    """Factory of a patch: Megatron's log line of an iteration also has the exposed communication."""
    recorder = session.adapter(StepRecorder)
    return lambda message: original(f"{message}{recorder.log_text()}" if _LOGGED in str(message) else message)


def collective_wait(original: Method, session: Session) -> Method:
    """Factory of a patch: every call of `torch.distributed.Work.wait` adds a `COLLECTIVE_WAIT` to `session.trace`.

    Blocking collectives of gloo also call `wait`. On CUDA a wait orders streams and does not block the host.
    """
    trace: Any = session.trace

    @functools.cache
    def number_of(code: CodeType, module: str, backward: bool) -> int:
        # The name is the collective, or the function that waits for a handle, and the pass: `all_reduce forward`.
        name = code.co_name if module.startswith("torch.distributed.") else f"handle in {code.co_qualname}"
        return trace.name(f"{name} {'backward' if backward else 'forward'}")

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        module = caller.f_globals.get("__name__", "")
        if module.startswith("megatron_overlap.comm."):  # the transports record their waits with the message
            return original(work, *args, **kwargs)
        start = trace.clock()
        try:
            return original(work, *args, **kwargs)
        finally:
            stop = trace.clock()
            number = number_of(caller.f_code, module, torch._C._current_graph_task_id() != -1)
            trace.add(Kind.COLLECTIVE_WAIT, start, stop, op=number)

    return wait


# train_step returns (losses, skipped, save now, exit now, exit code, grad norm, ...) in every reviewed release.
_LOSSES, _SKIPPED, _GRAD_NORM = 0, 1, 5


class StepRecorder(Adapter):
    """Records the training steps of this rank into `run_dir`, with full precision, which Megatron's log lacks.

    Files: `steps-rank{r}.jsonl` (one line per iteration), `evaluations-rank{r}.jsonl` (one line per evaluation),
    `meta-rank{r}.json` (versions, device, layout) at the first step, `report-rank{r}.json` at the end; with
    `session.trace` `events-rank{r}.bin` (one block per step), and the exposed communication in Megatron's logs. Files
    of an earlier run in the same folder are replaced. After the first one that cannot be written, as on a full disk,
    the training goes on without records of this rank: `ended`. `device` is "cpu", where `adapters.cpu` replaces the
    functions of `torch.cuda`, or "cuda". The meta file gets `link`, the config of the network between hosts.
    """

    def __init__(self, session: Session, run_dir: Path, rank: int, device: str, link: dict[str, Any] | None) -> None:
        super().__init__(session)
        self._run_dir, self._rank, self._device, self._link = run_dir, rank, device, link
        self._iteration = self._start_ns = 0
        self._since_log: list[tuple[float, float]] = []
        self.ended = False
        events, self._evaluations = run_dir / f"events-rank{rank}.bin", run_dir / f"evaluations-rank{rank}.jsonl"
        for path in (events, self._evaluations, self._json("meta"), self._json("report")):
            path.unlink(missing_ok=True)
        self._traced: tuple[EventFile, Trace] | None = None
        if session.trace is not None:
            self._traced = EventFile(events, rank), session.trace
        self._steps: IO[str] = (run_dir / f"steps-rank{rank}.jsonl").open("w", encoding="utf-8", buffering=1)

    def close(self) -> None:
        with self._writing():
            self._steps.close()
        if self._traced is not None:
            self._traced[0].close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.ended:
                text = f"rank {self._rank} records no more steps in {self._run_dir}: {error.strerror}"
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            self.ended = True

    def step_begins(self) -> None:
        """Starts the clock; before the first step it writes the meta file."""
        if self._iteration == 0:
            facts = {"rank": self._rank, "link": self._link, "argv": sys.argv}
            with self._writing():
                self._write_json("meta", {**describe_run(self._device), **facts})
            self._compare_clocks()
        self.start_clock()

    def start_clock(self) -> None:
        """Reads the clock before a step or an evaluation."""
        torch.cuda.synchronize()
        self._start_ns = time.perf_counter_ns()

    def step_completed(self, iterations_before: int | None, result: Any) -> None:
        """Writes the line of the step. `iterations_before`: completed before it, if Megatron passes their number."""
        torch.cuda.synchronize()
        stop_ns = time.perf_counter_ns()
        # A resumed run does not start at 0.
        self._iteration = iterations_before + 1 if iterations_before is not None else self._iteration + 1
        if self.ended:
            if self._traced is not None:
                self._traced[1].take()
            return
        row: dict[str, Any] = {
            "iteration": self._iteration,
            "step_time_ms": (stop_ns - self._start_ns) / 1e6,
            # Ranks of other pipeline stages than the last one have no loss.
            "loss": _number(result[_LOSSES].get("lm loss", next(iter(result[_LOSSES].values()), None))),
            "grad_norm": _number(result[_GRAD_NORM]),
            "skipped": bool(result[_SKIPPED]),
            "peak_memory_bytes": torch.cuda.max_memory_allocated(),
            "time": time.time(),
        }
        with self._writing():
            if self._traced is not None:
                row["exposed"] = self._write_events(*self._traced, stop_ns)
            self._steps.write(json.dumps(row) + "\n")

    def evaluation_completed(self) -> None:
        """Writes the line of the evaluation."""
        torch.cuda.synchronize()
        row = {"iteration": self._iteration, "time_ms": (time.perf_counter_ns() - self._start_ns) / 1e6}
        with self._writing(), self._evaluations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def finish(self, report: dict[str, Any], *, succeeded: bool) -> None:
        """Writes the session's report of this rank; after a successful run all ranks compare their clocks once more."""
        with self._writing():
            self._write_json("report", report)
        if succeeded and self._iteration:
            self._compare_clocks()

    def _compare_clocks(self) -> None:
        """Records the offset to rank 0's clock; collective. Without an answer the clocks count as equal."""
        world = dist.group.WORLD
        if self._traced is None or world is None:  # no trace, or the script destroyed the groups
            return
        try:
            with self._writing():
                self._traced[0].mark(compare_clocks(world))
        except RuntimeError as error:
            warnings.warn(f"trace: the ranks' clocks could not be compared: {error}", stacklevel=2)

    def _write_events(self, events: EventFile, trace: Trace, stop_ns: int) -> dict[str, Any]:
        """Writes the events of a step; returns its exposed communication as JSON can hold it."""
        trace.add(Kind.STEP, self._start_ns, stop_ns, operation=self._iteration)
        exposed = exposed_in(events.write(trace), self._start_ns, stop_ns)
        share = exposed.total_ms / ((stop_ns - self._start_ns) / 1e6)
        self._since_log.append((exposed.total_ms, share))
        self._to_writers(exposed, share)
        ops = [[op, direction, time_ms] for (op, direction), time_ms in exposed.by_op.items()]
        return {"total_ms": exposed.total_ms, "ops": ops}

    def log_text(self) -> str:
        """The fields for Megatron's log line: means over the steps since the last line, on the rank that prints it."""
        if not self._since_log:
            return ""
        time_ms, share = (sum(values) / len(values) for values in zip(*self._since_log, strict=True))
        self._since_log.clear()
        return f" {_SERIES} (ms): {time_ms:.1f} | exposed share of step: {share:.1%} |"

    def _to_writers(self, exposed: Exposed, share: float) -> None:
        """Writes to TensorBoard and Weights & Biases where Megatron enables them, which is on its last rank."""
        from megatron.training import get_args
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        board, wandb = get_tensorboard_writer(), get_wandb_writer()
        if (board is None and wandb is None) or self._iteration % get_args().tensorboard_log_interval:
            return
        series = {f"{_SERIES}/total ms": exposed.total_ms, f"{_SERIES}/share of step": share}
        series |= {f"{_SERIES}/{op} {direction} ms": value for (op, direction), value in exposed.by_op.items()}
        for name, value in series.items():
            if board is not None:
                board.add_scalar(name, value, self._iteration)
        if wandb is not None:
            wandb.log(series, self._iteration)

    def _json(self, name: str) -> Path:
        return self._run_dir / f"{name}-rank{self._rank}.json"

    def _write_json(self, name: str, content: dict[str, Any]) -> None:
        self._json(name).write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")


def describe_run(device: str) -> dict[str, Any]:
    """Versions, device and layout of this run of Megatron on `cpu` or `cuda`."""
    from megatron.training import get_args

    args = get_args()
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return {
        "versions": {
            "megatron_overlap": __version__,
            "megatron_core": installed_versions()["megatron-core"],
            "torch": torch.__version__,
            "transformer_engine": installed_release("transformer-engine"),
            "python": platform.python_version(),
        },
        "device": device,
        "device_name": name,
        "dtype": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        "world_size": args.world_size,
        "tensor_parallel": args.tensor_model_parallel_size,
        "pipeline_parallel": args.pipeline_model_parallel_size,
        "context_parallel": args.context_parallel_size,
        "data_parallel": args.data_parallel_size,
        "threads": torch.get_num_threads(),
    }


def _number(value: Any) -> float | None:
    return None if value is None else float(value)


def train_step(original: Method, session: Session) -> Method:
    """Factory of the patch."""

    def run(*args: Any, **kwargs: Any) -> Any:
        iterations_before = kwargs.get("iteration")
        session.next_step(None if iterations_before is None else iterations_before + 1)
        recorder = session.find(StepRecorder)
        if recorder is None:
            return original(*args, **kwargs)
        recorder.step_begins()
        result = original(*args, **kwargs)
        recorder.step_completed(iterations_before, result)
        return result

    return run


def evaluate(original: Method, session: Session) -> Method:
    """Factory of the patch."""
    recorder = session.adapter(StepRecorder)

    def run(*args: Any, **kwargs: Any) -> Any:
        recorder.start_clock()
        result = original(*args, **kwargs)
        recorder.evaluation_completed()
        return result

    return run
