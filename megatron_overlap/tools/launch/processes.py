"""Run N copies of a program as the ranks of a job, over loopback or in a netlab.

All processes of the job end if one rank fails or the launcher ends.
"""

import contextlib
import errno
import json
import os
import random
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from megatron_overlap.tools.launch.netlab import HELPER, Netlab, owner_label

LAB_PORT = 29500  # always free: the lab has its own network namespaces
_PORTS = range(20000, 32000)  # below the local ports of Linux (net.ipv4.ip_local_port_range: 32768 to 60999)
OnLine = Callable[[int, str], None]
"""Called with the number of a rank and one line of its output."""

# Other ranks fail within milliseconds of the first failure. After this time the exit times name the first rank.
_SETTLE_S = 0.3
_MAX_LINE = 1 << 20  # bytes of a line to keep in memory: a progress bar may never end its line
_SUPERVISOR_S = 5.0  # deadline of a supervisor that ends the descendants of its rank


@dataclass(frozen=True)
class RankCommand:
    """One rank to start. `env` is added to the environment of the launcher; `host` is a name for messages."""

    rank: int
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    host: str = "localhost"


class RunError(RuntimeError):
    """A rank failed, or the job exceeded its timeout; the text names the ranks. All processes have ended."""


class _Rank:
    """One supervised rank: its pipes, its last lines of output and its exit code."""

    def __init__(self, command: RankCommand, argv: Sequence[str], log: Path, on_line: OnLine | None) -> None:
        self.command, self.log_path, self._on_line = command, log, on_line
        self.lines: deque[str] = deque(maxlen=20)
        self.code: int | None = None  # or minus the number of the signal that killed the rank
        self.ended_at = 0.0
        self.supervisor_ended = False
        self._partial = b""
        self._log: BinaryIO = log.open("wb")
        status_read, status_write = os.pipe()
        stop_read, self._stop = os.pipe()
        try:
            self.process = subprocess.Popen(
                [*HELPER, "supervise", owner_label(), str(os.getpid()), str(status_write), str(stop_read), *argv],
                env={**os.environ, **command.env},
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

    def describe_end(self) -> str:
        """`exit code 3` or `killed by SIGKILL`."""
        assert self.code is not None
        if self.code >= 0:
            return f"exit code {self.code}"
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-self.code, f'signal {-self.code}')}"

    def read_output(self) -> bool:
        """Read the available output. Returns False at its end."""
        data = os.read(self.output_fd, 1 << 16)
        self._log.write(data)
        self._log.flush()
        *lines, last = (self._partial + data).split(b"\n")
        self._partial = last[-_MAX_LINE:]
        if not data and self._partial:
            lines, self._partial = [self._partial], b""
        for line in lines:
            # A progress bar rewrites its line with carriage returns: keep the last text.
            text = line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]
            self.lines.append(text)
            if self._on_line is not None:
                self._on_line(self.command.rank, text)
        return bool(data)

    def read_status(self) -> bool:
        """Read the exit code from the supervisor. Returns False if the supervisor has ended."""
        if data := os.read(self.status_fd, 1 << 12):
            status = json.loads(data)
            self.code, self.ended_at = status["code"], status["time"]
            return True
        self.supervisor_ended = True
        if self.code is None:  # the supervisor was killed, and the kernel killed its rank
            self.code, self.ended_at = self.process.wait() or 1, time.monotonic()
        return False

    def kill(self) -> None:
        """Make the supervisor kill the rank and its descendants."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._stop, b"x")  # a close is no signal while a forked process has a copy of the pipe
        self.process.send_signal(signal.SIGCONT)  # the process may be stopped

    def close(self) -> None:
        self.kill()
        with self.process:  # closes its pipe and waits for its end
            os.close(self.status_fd)
            os.close(self._stop)
        self._log.close()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process group of the rank. SIGKILL ends its supervisor too."""
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class _Job:
    """The started ranks of a run and the event loop that reads their output and exit codes."""

    def __init__(self) -> None:
        self.ranks: list[_Rank] = []
        self._selector = selectors.DefaultSelector()

    def add(self, rank: _Rank) -> None:
        self.ranks.append(rank)
        self._selector.register(rank.output_fd, selectors.EVENT_READ, rank.read_output)
        self._selector.register(rank.status_fd, selectors.EVENT_READ, rank.read_status)

    def failed(self) -> list[_Rank]:
        """Ranks with a nonzero exit code, the first failure first."""
        return sorted((r for r in self.ranks if r.code), key=lambda r: r.ended_at)

    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.code is None]

    def all_ended(self) -> bool:
        return all(rank.supervisor_ended for rank in self.ranks)

    def pump(self, seconds: float) -> bool:
        """Wait for events up to the given time and handle them. Returns False if no event came."""
        events = self._selector.select(max(0.0, seconds))
        for key, _ in events:
            if not key.data():
                self._selector.unregister(key.fd)
        return bool(events)

    def pump_until(self, deadline: float, done: Callable[[], bool]) -> bool:
        """Handle events until `done()` holds. Returns False if the deadline passes first."""
        while not done():
            if time.monotonic() >= deadline:
                return False
            self.pump(min(0.5, deadline - time.monotonic()))
        return True

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
        # Read the rest of the output until none comes for a second. A detached process may hold the pipe open.
        end = time.monotonic() + 10.0
        while self._selector.get_map() and time.monotonic() < end and self.pump(1.0):
            pass

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self._selector.close()


@contextlib.contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into `SystemExit`, so that `finally` blocks run. Only in the main thread."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGHUP) if in_main_thread else ()

    def exit_on_signal(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.signal(number, exit_on_signal) for number in numbers}
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
    lab: Netlab | None = None,
    on_line: OnLine | None = None,
    grace_s: float = 10.0,
) -> float:
    """Run all ranks to their end, and return the wall time in seconds.

    The output of rank r goes to `log_dir/rank{r}.log`. If one rank fails, all ranks get SIGTERM and after `grace_s`
    SIGKILL, their descendants included. The same happens on Ctrl-C, SIGTERM, SIGHUP and on an exception of `on_line`.
    If this process is killed by SIGKILL, the supervisors end the ranks.

    The ranks run on the hosts of an open `lab`, or over loopback. `timeout_s` limits the whole job. Logs of an earlier
    job in `log_dir` are replaced.

    Raises RunError if a rank failed (the text names the first one), or the timeout passed (it names the running ranks).
    """
    log_dir.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    deadline = started + timeout_s if timeout_s is not None else float("inf")
    with _signals_as_exceptions(), contextlib.closing(_Job()) as job:
        try:
            for command in commands:
                rank, argv = command.rank, command.argv
                argv = argv if lab is None else lab.wrap(lab.host_of(rank), argv)
                job.add(_Rank(command, argv, log_dir / f"rank{rank}.log", on_line))
            in_time = job.pump_until(deadline, lambda: job.all_ended() or bool(job.failed()))
            if job.failed():
                job.pump_until(time.monotonic() + _SETTLE_S, lambda: not job.running())
            failed, running = job.failed(), job.running()
            job.end_all(grace_s if running else 0)
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: `close` kills at once
                job.end_all(0 if isinstance(error, KeyboardInterrupt) else grace_s)
            raise
    if failed:
        first, *others = failed
        name = f"rank {first.command.rank} on {first.command.host}"
        text = [f"{name}: {first.describe_end()}; all ranks have ended; log: {first.log_path}"]
        text += [f"  | {line}" for line in first.lines or ["(no output)"]]
        if others:
            ends = ", ".join(f"rank {other.command.rank} ({other.describe_end()})" for other in others)
            text.append(f"failed afterwards: {ends}")
        raise RunError("\n".join(text))
    if not in_time:
        ranks = ", ".join(str(rank.command.rank) for rank in running)
        text = [f"not done after {timeout_s:g} s: ranks {ranks} were still running; all ranks have ended"]
        text += [f"  rank {rank.command.rank} | {rank.lines[-1] if rank.lines else '(no output)'}" for rank in running]
        raise RunError("\n".join(text))
    return time.monotonic() - started


def free_port() -> int:
    """A free TCP port of loopback that the kernel gives to no outgoing connection before rank 0 listens on it.

    Raises OSError if none of 100 ports is free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port among 100 from {_PORTS.start} to {_PORTS.stop - 1}")


MALLOC_ENV = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings that make glibc reuse freed memory, like the caching allocator of a GPU, in huge pages if the kernel offers
them. Without them tensors of some megabytes may be fresh pages on each use."""


def loopback_env() -> dict[str, str]:
    """Environment variables that make torch.distributed use loopback."""
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def worker_commands(
    argv: Sequence[str], world_size: int, *, lab: Netlab | None = None, threads: int = 1
) -> list[RankCommand]:
    """The commands of `world_size` ranks that execute `argv` over loopback, or on the hosts of `lab`."""
    ranks_per_host, port = (world_size, free_port()) if lab is None else (lab.ranks_per_host, LAB_PORT)
    commands = []
    for rank in range(world_size):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in MALLOC_ENV.items() if name not in os.environ},
        }
        if lab is None:
            commands.append(RankCommand(rank, argv, env | loopback_env()))
        else:
            host = lab.host_of(rank)
            commands.append(RankCommand(rank, argv, env | lab.env(host), lab.host_name(host)))
    return commands


def run_workers(
    script: str | os.PathLike[str],
    args: Sequence[str],
    world_size: int,
    *,
    lab: Netlab | None = None,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
) -> None:
    """Run a Python script as `world_size` ranks and return when all ranks have ended.

    The environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. Raises RunError as `run_ranks` does;
    the text names a log file, which stays.
    """
    commands = worker_commands([sys.executable, os.fspath(script), *args], world_size, lab=lab)
    folder = Path(tempfile.mkdtemp(prefix="megatron_overlap_"))
    run_ranks(commands, timeout_s=timeout_s, log_dir=folder, lab=lab, on_line=on_line)
    shutil.rmtree(folder)
