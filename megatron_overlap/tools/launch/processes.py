"""Runs the ranks of a job on this machine: all of them or none. Whatever ends it, no process is left."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from megatron_overlap.tools.launch import orphans
from megatron_overlap.tools.launch.results import (
    OnLine,
    RankCommand,
    RankEnd,
    RankFailed,
    RunError,
    RunResult,
    RunTimeout,
)

__all__ = [
    "OnLine",
    "RankCommand",
    "RankEnd",
    "RankFailed",
    "RunError",
    "RunResult",
    "RunTimeout",
    "run_ranks",
]

_SUPERVISE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("helper_process.py")), "supervise")
LAST_LINES = 20
GRACE_S = 10.0  # from SIGTERM to SIGKILL
# The first rank to die takes others with it within milliseconds; after this time it is known which was first.
_SETTLE_S = 0.3
_SUPERVISOR_S = 5.0  # for a supervisor to end what its rank started


class _Rank:
    """One supervised rank: its pipes, its last lines, and how it ended once that is known."""

    def __init__(self, command: RankCommand, log: Path) -> None:
        self.command = command
        self.log_path = log
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.code: int | None = None
        self.ended_at = 0.0
        self.supervisor_gone = False
        self._partial = b""
        self._log: BinaryIO = log.open("wb")
        status_read, status_write = os.pipe()
        stop_read, self._stop = os.pipe()
        numbers = [orphans.label(), str(os.getpid()), str(status_write), str(stop_read)]
        try:
            self.process = subprocess.Popen(
                [*_SUPERVISE, *numbers, *command.argv],
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
        assert self.code is not None
        command = self.command
        return RankEnd(command.rank, command.host, self.code, self.log_path, tuple(self.lines))

    def read_output(self, on_line: OnLine | None) -> bool:
        """Takes what the rank printed; returns whether more can come."""
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
            # A progress bar rewrites its line: what it shows last is the line.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self.lines.append(text)
            if on_line is not None:
                on_line(self.command.rank, text)
        return bool(data)

    def read_status(self) -> None:
        data = os.read(self.status_fd, 1 << 12)
        if data:
            status = json.loads(data)
            self.code, self.ended_at = status["code"], status["time"]
            return
        self.supervisor_gone = True
        if self.code is None:  # somebody killed it, and the kernel the rank with it
            self.process.wait()
            self.code, self.ended_at = self.process.returncode or 1, time.monotonic()

    def terminate(self) -> None:
        """Asks the rank and its process group to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Has the supervisor kill the rank and all that it started."""
        if self._stop < 0:
            return
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stop, b"x")  # closing alone says nothing while a process forked from this one has a copy
        os.close(self._stop)
        self._stop = -1
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, signal.SIGCONT)  # somebody may have stopped it

    def kill_supervisor(self) -> None:
        """For a supervisor that does not answer; the kernel kills its rank with it."""
        self._signal(signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.wait()
        os.close(self.status_fd)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class _Job:
    """The ranks that were started, and what they have said so far."""

    def __init__(self, on_line: OnLine | None) -> None:
        self.ranks: list[_Rank] = []
        self._on_line = on_line
        self._selector = selectors.DefaultSelector()
        self._open_outputs: set[int] = set()

    def add(self, rank: _Rank) -> None:
        self.ranks.append(rank)
        self._selector.register(rank.output_fd, selectors.EVENT_READ, (rank, "output"))
        self._selector.register(rank.status_fd, selectors.EVENT_READ, (rank, "status"))
        self._open_outputs.add(rank.output_fd)

    def failed(self) -> list[_Rank]:
        return sorted((r for r in self.ranks if r.code), key=lambda r: r.ended_at)

    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def gone(self) -> bool:
        return all(rank.supervisor_gone for rank in self.ranks)

    def pump(self, seconds: float) -> bool:
        """Handles what comes within the given time, returns at the first of it; False: none came."""
        events = self._selector.select(max(0.0, seconds))
        for key, _ in events:
            rank, what = key.data
            if what == "status":
                rank.read_status()
                if rank.supervisor_gone:
                    self._selector.unregister(rank.status_fd)
            elif not rank.read_output(self._on_line):
                self._selector.unregister(rank.output_fd)
                self._open_outputs.discard(rank.output_fd)
        return bool(events)

    def pump_until(self, deadline: float, done: Callable[[], bool]) -> bool:
        while not done():
            if time.monotonic() >= deadline:
                return False
            self.pump(min(0.5, deadline - time.monotonic()))
        return True

    def drain(self) -> None:
        """Reads the rest of the output. Bounded: a process that got away may hold the pipe open."""
        self.pump_until(time.monotonic() + 1.0, lambda: not self._open_outputs)

    def end_all(self, grace_s: float) -> None:
        """Ends what runs: SIGTERM; after the grace, SIGKILL to all a rank started, then to supervisors."""
        if grace_s > 0:
            for rank in self.ranks:
                rank.terminate()
            self.pump_until(time.monotonic() + grace_s, self.gone)
        for rank in self.ranks:
            rank.kill()
        if not self.pump_until(time.monotonic() + _SUPERVISOR_S, self.gone):
            for rank in self.ranks:
                rank.kill_supervisor()
        self.drain()

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._selector.close()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """SIGTERM and SIGHUP leave by `SystemExit`, so that there is a clean-up. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {n: signal.signal(n, leave) for n in (signal.SIGTERM, signal.SIGHUP)}
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
    """Runs all ranks to their end.

    What rank r prints goes to `log_dir/rank{r}.log`. When one rank fails, all are ended: SIGTERM, after
    `grace_s` SIGKILL, also to whatever they have started. The same on Ctrl-C, SIGTERM, SIGHUP, or any
    exception of `on_line`; and if this process is killed outright, the supervisors of the ranks do it.

    Args:
        commands: the ranks; numbers must differ.
        timeout_s: for the whole job; None: no limit.
        log_dir: made if it is missing; logs of an earlier job in it are replaced.
        on_line: called with (rank, line) for every line a rank prints.
        grace_s: time for a rank to end by itself after SIGTERM.

    Raises:
        ValueError: no commands, or two for one rank.
        RankFailed: names the first rank that failed.
        RunTimeout: names the ranks that were still running.
    """
    numbers = [command.rank for command in commands]
    if not numbers or len(set(numbers)) != len(numbers):
        raise ValueError(f"commands: ranks {numbers}: give at least one, and each rank once")
    log_dir.mkdir(parents=True, exist_ok=True)
    orphans.remove()
    started = time.monotonic()
    deadline = started + timeout_s if timeout_s is not None else float("inf")
    with _signals_as_exceptions():
        job = _Job(on_line)
        try:
            for command in commands:
                job.add(_Rank(command, log_dir / f"rank{command.rank}.log"))
            in_time = job.pump_until(deadline, lambda: job.gone() or bool(job.failed()))
            if job.failed():
                job.pump_until(time.monotonic() + _SETTLE_S, lambda: not job.running())
            failed, running = job.failed(), job.running()
            job.end_all(grace_s if running else 0)
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: no more patience, below
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
