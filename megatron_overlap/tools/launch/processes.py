"""Run the ranks of a job on this machine and end all their processes if one rank fails or the launcher ends."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from megatron_overlap.tools.launch.netlab import HELPER, owner_label

OnLine = Callable[[int, str], None]
"""Called with the number of a rank and one line of its output."""

LAST_LINES = 20
GRACE_S = 10.0
"""Seconds from SIGTERM to SIGKILL."""
# Other ranks fail within milliseconds of the first failure. After this time the exit times name the first rank.
_SETTLE_S = 0.3
_SUPERVISOR_S = 5.0  # deadline of a supervisor that ends the descendants of its rank


@dataclass(frozen=True)
class RankCommand:
    """One rank to start. `env` is added to the environment of the launcher; `host` is a name for messages."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "localhost"
    cwd: Path | None = None


@dataclass(frozen=True)
class RankEnd:
    """How a rank ended. `code` is its exit code, or minus the number of the signal that killed it."""

    rank: int
    host: str
    code: int
    log: Path
    last_lines: tuple[str, ...]

    def describe(self) -> str:
        """`exit code 3` or `killed by SIGKILL`."""
        if self.code >= 0:
            return f"exit code {self.code}"
        try:
            return f"killed by {signal.Signals(-self.code).name}"
        except ValueError:
            return f"killed by signal {-self.code}"


@dataclass(frozen=True)
class RunResult:
    """All ranks ended with exit code 0: their logs in rank order and the wall time in seconds."""

    logs: tuple[Path, ...]
    wall_s: float


class RunError(RuntimeError):
    """The job failed. All its processes have ended."""


class RankFailed(RunError):  # noqa: N818
    """A rank ended with an exit code other than 0 or by a signal.

    `end` is the first rank that failed, `others` are those that failed before the launcher ended the job.
    """

    def __init__(self, end: RankEnd, others: Sequence[RankEnd] = ()) -> None:
        self.end = end
        self.others = tuple(others)
        text = [f"rank {end.rank} on {end.host}: {end.describe()}; all ranks have ended; log: {end.log}"]
        text += [f"  | {line}" for line in end.last_lines] or ["  | (no output)"]
        if others:
            text.append("failed afterwards: " + ", ".join(f"rank {o.rank} ({o.describe()})" for o in others))
        super().__init__("\n".join(text))


class RunTimeout(RunError):  # noqa: N818
    """The job exceeded its timeout while the ranks in `running` had not ended."""

    def __init__(self, timeout_s: float, last_lines: Mapping[int, Sequence[str]]) -> None:
        self.running = tuple(last_lines)
        ranks = ", ".join(map(str, self.running))
        text = [f"not done after {timeout_s:g} s: ranks {ranks} were still running; all ranks have ended"]
        for rank, lines in last_lines.items():
            text.append(f"  rank {rank} | {lines[-1] if lines else '(no output)'}")
        super().__init__("\n".join(text))


class _Rank:
    """One supervised rank: its pipes, its last lines of output and its exit code."""

    def __init__(self, command: RankCommand, log: Path) -> None:
        self.command = command
        self.log_path = log
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.code: int | None = None
        self.ended_at = 0.0
        self.supervisor_ended = False
        self._partial = b""
        self._log: BinaryIO = log.open("wb")
        status_read, status_write = os.pipe()
        stop_read, self._stop = os.pipe()
        numbers = [owner_label(), str(os.getpid()), str(status_write), str(stop_read)]
        try:
            self.process = subprocess.Popen(
                [*HELPER, "supervise", *numbers, *command.argv],
                env={**os.environ, **command.env},
                cwd=command.cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write, stop_read),
                start_new_session=True,
            )
        except BaseException:
            os.close(status_read)
            os.close(self._stop)
            self._log.close()
            raise
        finally:
            os.close(status_write)
            os.close(stop_read)
        self.status_fd = status_read
        assert self.process.stdout is not None
        self.output_fd = self.process.stdout.fileno()
        os.set_blocking(self.output_fd, False)

    def end(self) -> RankEnd:
        """How the rank ended."""
        assert self.code is not None
        command = self.command
        return RankEnd(command.rank, command.host, self.code, self.log_path, tuple(self.lines))

    def read_output(self, on_line: OnLine | None) -> bool:
        """Read the available output of the rank. Returns False at the end of the output."""
        try:
            data = os.read(self.output_fd, 1 << 16)
        except BlockingIOError:
            return True
        self._log.write(data)
        self._log.flush()
        *lines, self._partial = (self._partial + data).split(b"\n")
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            # A progress bar rewrites its line with carriage returns: keep the last text.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self.lines.append(text)
            if on_line is not None:
                on_line(self.command.rank, text)
        return bool(data)

    def read_status(self) -> None:
        """Read the exit code from the supervisor, or detect that the supervisor has ended."""
        data = os.read(self.status_fd, 1 << 12)
        if data:
            status = json.loads(data)
            self.code, self.ended_at = status["code"], status["time"]
            return
        self.supervisor_ended = True
        if self.code is None:  # the supervisor was killed, and the kernel killed its rank
            self.process.wait()
            self.code, self.ended_at = self.process.returncode or 1, time.monotonic()

    def kill(self) -> None:
        """Make the supervisor kill the rank and its descendants."""
        if self._stop < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stop, b"x")  # a close is no signal while a forked process has a copy of the pipe
        os.close(self._stop)
        self._stop = -1
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)  # the process may be stopped

    def close(self) -> None:
        """Kill the rank if it runs, and close its pipes and its log."""
        self.kill()
        self.process.wait()
        os.close(self.status_fd)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the rank. SIGKILL ends its supervisor too."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class _Job:
    """The started ranks of a run and the event loop that reads their output and exit codes."""

    def __init__(self, on_line: OnLine | None) -> None:
        self.ranks: list[_Rank] = []
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._open_outputs: set[int] = set()

    def add(self, rank: _Rank) -> None:
        """Watch the output and the status of a started rank."""
        self.ranks.append(rank)
        self._selector.register(rank.output_fd, selectors.EVENT_READ, (rank, "output"))
        self._selector.register(rank.status_fd, selectors.EVENT_READ, (rank, "status"))
        self._open_outputs.add(rank.output_fd)

    def failed(self) -> list[_Rank]:
        """Ranks with a nonzero exit code, the first failure first."""
        return sorted((r for r in self.ranks if r.code), key=lambda r: r.ended_at)

    def running(self) -> list[_Rank]:
        """Ranks that have not ended."""
        return [rank for rank in self.ranks if rank.code is None]

    def all_ended(self) -> bool:
        """Whether all ranks and their supervisors have ended."""
        return all(rank.supervisor_ended for rank in self.ranks)

    def pump(self, seconds: float) -> bool:
        """Wait for events up to the given time and handle them. Returns False if no event came."""
        events = self._selector.select(max(0.0, seconds))
        for key, _ in events:
            rank, what = key.data
            if what == "status":
                rank.read_status()
                if rank.supervisor_ended:
                    self._selector.unregister(rank.status_fd)
            elif not rank.read_output(self._on_line):
                self._selector.unregister(rank.output_fd)
                self._open_outputs.discard(rank.output_fd)
        return bool(events)

    def pump_until(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Handle events until `done()` holds. Returns False if the deadline passes first."""
        while not done():
            if time.monotonic() >= deadline:
                return False
            self.pump(min(0.5, deadline - time.monotonic()))
        return True

    def drain(self) -> None:
        """Read the rest of the output until none comes for a second, for at most ten seconds.

        A detached process may hold the pipe open.
        """
        end = time.monotonic() + 10.0
        while self._open_outputs and time.monotonic() < end and self.pump(1.0):
            pass

    def end_all(self, grace_s: float) -> None:
        """End all ranks: SIGTERM, after the grace period SIGKILL to all descendants, then to the supervisors."""
        if grace_s > 0:
            for rank in self.ranks:
                rank.send(signal.SIGTERM)
            self.pump_until(time.monotonic() + grace_s, self.all_ended)
        for rank in self.ranks:
            rank.kill()
        if not self.pump_until(time.monotonic() + _SUPERVISOR_S, self.all_ended):
            for rank in self.ranks:
                rank.send(signal.SIGKILL)  # the supervisor does not respond; the kernel then kills its rank
        self.drain()

    def close(self) -> None:
        """Close all ranks and the selector."""
        for rank in self.ranks:
            rank.close()
        self._selector.close()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that `finally` blocks run. Only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def exit_on_signal(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, exit_on_signal) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def run_ranks(
    commands: Sequence[RankCommand],
    *,
    timeout_s: float | None,
    log_dir: Path,
    on_line: OnLine | None = None,
    grace_s: float = GRACE_S,
) -> RunResult:
    """Run all ranks to their end.

    The output of rank r goes to `log_dir/rank{r}.log`. If one rank fails, all ranks get SIGTERM and after `grace_s`
    SIGKILL, their descendants included. The same happens on Ctrl-C, SIGTERM, SIGHUP and on an exception of `on_line`.
    If this process is killed by SIGKILL, the supervisors end the ranks.

    `timeout_s` limits the whole job. `on_line` is called with (rank, line) for every line of output. Logs of an earlier
    job in `log_dir` are replaced.

    Raises:
        ValueError: no commands, or two commands for one rank.
        RankFailed: a rank failed; the text names the first one.
        RunTimeout: the timeout passed; the text names the ranks that were running.
    """
    numbers = [command.rank for command in commands]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"commands: ranks {numbers}: give at least one, and each rank once")
    log_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + timeout_s if timeout_s is not None else float("inf")
    with _signals_as_exceptions():
        job = _Job(on_line)
        try:
            for command in commands:
                job.add(_Rank(command, log_dir / f"rank{command.rank}.log"))
            in_time = job.pump_until(deadline, lambda: job.all_ended() or bool(job.failed()))
            if job.failed():
                job.pump_until(time.monotonic() + _SETTLE_S, lambda: not job.running())
            failed, running = job.failed(), job.running()
            job.end_all(grace_s if running else 0)
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: `close` below kills at once
                job.end_all(0 if isinstance(error, KeyboardInterrupt) else grace_s)
            raise
        finally:
            job.close()
    if failed:
        raise RankFailed(failed[0].end(), [rank.end() for rank in failed[1:]])
    if not in_time:
        assert timeout_s is not None
        raise RunTimeout(timeout_s, {rank.command.rank: list(rank.lines) for rank in running})
    return RunResult(tuple(rank.log_path for rank in job.ranks), time.monotonic() - started)
