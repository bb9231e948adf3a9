"""`run_ranks` with processes that succeed, fail, hang, detach or are killed: no process may remain."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megatron_overlap.tools.launch import processes
from megatron_overlap.tools.launch.processes import RankCommand, RunError, run_ranks
from tests.helpers.netlab import available
from tests.tools.launch.watch import helpers_of, new_token, still_held, wait_for, with_token

ROOT = Path(__file__).parents[3]
SLEEP = "import time; print('sleeping', flush=True); time.sleep(600)"
# Starts a process that leaves its parent, its session and its process group.
DETACH = (
    "import os, sys, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        os.execv(sys.executable, [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]])\n"
    "    os._exit(0)\n"
    "os.wait()\n"
)


@pytest.fixture
def token() -> Iterator[str]:
    """A word on the command line of all ranks. Within 5 s after the test no process has it."""
    word = new_token()
    yield word
    deadline = time.monotonic() + 5.0
    while (left := with_token(word)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


def command(rank: int, code: str, token: str) -> RankCommand:
    return RankCommand(rank, [sys.executable, "-c", code, token], host=f"node{rank}")


def test_successful_ranks(tmp_path: Path, token: str) -> None:
    lines: list[tuple[int, str]] = []
    code = "import os, sys; print(os.environ['NAME']); print('10%\\r99%', file=sys.stderr); print('no newline', end='')"
    commands = [RankCommand(r, [sys.executable, "-c", code, token], {"NAME": f"rank {r}"}) for r in (0, 1)]
    logs = tmp_path / "logs"
    wall_s = run_ranks(commands, timeout_s=30, log_dir=logs, on_line=lambda r, line: lines.append((r, line)))
    assert sorted(log.name for log in logs.iterdir()) == ["rank0.log", "rank1.log"]
    for rank in (0, 1):
        text = (logs / f"rank{rank}.log").read_text()
        assert sorted(text.replace("\r", "\n").split("\n")) == sorted(["10%", "99%", f"rank {rank}", "no newline"])
        assert {line for r, line in lines if r == rank} == {"99%", f"rank {rank}", "no newline"}
    assert 0 < wall_s < 30


def test_long_output_is_complete(tmp_path: Path, token: str) -> None:
    count = 200_000
    code = f"for i in range({count}): print(i)"
    run_ranks([command(0, code, token)], timeout_s=30, log_dir=tmp_path)
    assert (tmp_path / "rank0.log").read_text().split() == [str(i) for i in range(count)]


def test_a_line_without_an_end_does_not_grow_in_memory(
    tmp_path: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_MAX_LINE", 100)
    lines: list[str] = []
    code = "import time; print(1000 * 'a', end='', flush=True); time.sleep(0.5); print('end')"
    run_ranks([command(0, code, token)], timeout_s=30, log_dir=tmp_path, on_line=lambda _, line: lines.append(line))
    (line,) = lines
    # The end of the line may be read apart from the text before it.
    assert line in (100 * "a" + "end", 97 * "a" + "end")
    assert (tmp_path / "rank0.log").read_text() == 1000 * "a" + "end\n"


def test_a_failed_rank_ends_all_ranks_and_is_named(tmp_path: Path, token: str) -> None:
    dies = "import sys, time; print('loss is 4.5'); time.sleep(0.3); print('out of luck', file=sys.stderr); sys.exit(3)"
    started = time.monotonic()
    with pytest.raises(RunError) as caught:
        run_ranks([command(0, SLEEP, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path)
    assert time.monotonic() - started < 5
    first, *rest = str(caught.value).splitlines()
    assert first == f"rank 1 on node1: exit code 3; all ranks have ended; log: {tmp_path}/rank1.log"
    assert sorted(rest) == ["  | loss is 4.5", "  | out of luck"]


def test_a_signal_is_named(tmp_path: Path, token: str) -> None:
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    with pytest.raises(RunError, match="rank 1 on node1: killed by SIGSEGV"):
        run_ranks([command(0, SLEEP, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path)


def test_the_first_failure_is_named_before_those_that_follow(tmp_path: Path, token: str) -> None:
    """Rank 1 fails and leaves children; rank 0 detects that and fails afterwards."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    notices = f"import os, time; file = open({str(pipe)!r}); file.read(); time.sleep(0.1); os._exit(9)"
    dies = (
        f"import os, subprocess, sys, time\nfile = open({str(pipe)!r}, 'w')\n"
        "sleep = [sys.executable, '-S', '-c', 'import time; time.sleep(99)', sys.argv[1]]\n"
        "for _ in range(20): subprocess.Popen(sleep)\n"
        "time.sleep(0.5)\n"
        "os._exit(5)"
    )
    with pytest.raises(RunError) as caught:
        run_ranks([command(0, notices, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path)
    assert str(caught.value).startswith("rank 1 on node1: exit code 5;")
    assert str(caught.value).endswith("failed afterwards: rank 0 (exit code 9)")


def test_a_rank_that_ignores_sigterm_is_killed(tmp_path: Path, token: str) -> None:
    ignores = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{SLEEP}"
    dies = "import time; time.sleep(0.3); raise SystemExit(1)"
    with pytest.raises(RunError, match="rank 1 on node1: exit code 1"):
        run_ranks([command(0, ignores, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path, grace_s=0.5)


def test_a_rank_has_a_grace_period_after_sigterm(tmp_path: Path, token: str) -> None:
    cleans_up = (
        "import signal, sys, time\n"
        "def clean_up(*_): time.sleep(0.5); print('cleaned up', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, clean_up)\n" + SLEEP
    )
    dies = "import time; time.sleep(0.3); raise SystemExit(1)"
    with pytest.raises(RunError):
        run_ranks([command(0, cleans_up, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path)
    assert "cleaned up" in (tmp_path / "rank0.log").read_text()


def test_a_stopped_rank_is_killed_when_another_fails(tmp_path: Path, token: str) -> None:
    stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    dies = "import time; time.sleep(0.3); raise SystemExit(1)"
    started = time.monotonic()
    with pytest.raises(RunError, match="rank 1 on node1: exit code 1"):
        run_ranks([command(0, stopped, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path, grace_s=0.5)
    assert time.monotonic() - started < 4  # its supervisor kills it, before the launcher kills the supervisor


def test_a_stopped_supervisor_is_continued_and_kills_its_rank(tmp_path: Path, token: str) -> None:
    stops_it = f"{DETACH}import signal; os.kill(os.getppid(), signal.SIGSTOP); time.sleep(600)"
    dies = "import time; time.sleep(0.3); raise SystemExit(1)"
    with pytest.raises(RunError, match="rank 1 on node1: exit code 1"):
        run_ranks([command(0, stops_it, token), command(1, dies, token)], timeout_s=60, log_dir=tmp_path, grace_s=0.2)


def test_descendants_end_with_their_rank(tmp_path: Path, token: str) -> None:
    run_ranks([command(0, DETACH, token)], timeout_s=30, log_dir=tmp_path)
    assert with_token(token) == []


def test_a_rank_ends_with_its_killed_supervisor(tmp_path: Path, token: str) -> None:
    code = "import os, signal, time; os.kill(os.getppid(), signal.SIGKILL); time.sleep(600)"
    with pytest.raises(RunError, match="rank 0 on node0: killed by SIGKILL"):
        run_ranks([command(0, code, token)], timeout_s=30, log_dir=tmp_path)


def test_timeout_names_the_running_ranks(tmp_path: Path, token: str) -> None:
    with pytest.raises(RunError) as caught:
        run_ranks([command(0, SLEEP, token), command(1, "pass", token)], timeout_s=3.0, log_dir=tmp_path)
    assert str(caught.value).splitlines() == [
        "not done after 3 s: ranks 0 were still running; all ranks have ended",
        "  rank 0 | sleeping",
    ]


def test_a_missing_program_fails_with_code_127(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        run_ranks([RankCommand(0, ["/no/such/program"])], timeout_s=30, log_dir=tmp_path)
    first, last = str(caught.value).splitlines()
    assert first.startswith("rank 0 on localhost: exit code 127;")
    assert last == "  | cannot start /no/such/program: No such file or directory"


def test_a_rank_that_cannot_be_started_ends_all_ranks(tmp_path: Path, token: str) -> None:
    with pytest.raises(ValueError, match="null byte"):
        run_ranks([command(0, SLEEP, token), RankCommand(1, ["a\0b"])], timeout_s=30, log_dir=tmp_path, grace_s=0.5)


def test_an_exception_of_on_line_ends_the_ranks(tmp_path: Path, token: str) -> None:
    def on_line(rank: int, line: str) -> None:
        raise RuntimeError(f"cannot use {line}")

    with pytest.raises(RuntimeError, match="cannot use sleeping"):
        run_ranks([command(0, SLEEP, token)], timeout_s=30, log_dir=tmp_path, on_line=on_line)


def test_signal_handlers_are_restored(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)
    run_ranks([RankCommand(0, ["true"])], timeout_s=30, log_dir=tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == before


def test_ranks_run_from_a_thread(tmp_path: Path, token: str) -> None:
    """The supervisors depend on the process, not on the thread that started them."""
    run = partial(run_ranks, [command(0, "print(1)", token)], timeout_s=30, log_dir=tmp_path)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert (tmp_path / "rank0.log").read_text() == "1\n"


LAUNCHER = """
import contextlib, os, signal, sys
from pathlib import Path
from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch import processes
from megatron_overlap.tools.launch.processes import RankCommand, run_ranks
token, log_dir, in_lab, detach = sys.argv[1:]
stopped = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
sleeps = detach + "print('ready', os.readlink('/proc/self/ns/net'), flush=True); time.sleep(600)"
lab = Netlab(hosts=2) if in_lab == "True" else None
with lab or contextlib.nullcontext():
    wrap = lab.wrap if lab else lambda host, argv: argv
    programs = [[sys.executable, "-c", code, token] for code in (sleeps, stopped)]
    commands = [RankCommand(rank, wrap(rank, program)) for rank, program in enumerate(programs)]
    def print_line(rank, line):
        forked = os.fork()  # has copies of all pipes and outlives the launcher
        if forked == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pause()
        print(line, forked, flush=True)
    run_ranks(commands, timeout_s=None, log_dir=Path(log_dir), on_line=print_line, grace_s=1)
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -2)]
)
@pytest.mark.parametrize("in_lab", [False, True])
def test_an_ended_launcher_leaves_no_process_and_no_namespace(
    number: signal.Signals, code: int, in_lab: bool, tmp_path: Path, token: str
) -> None:
    """One rank is stopped; the other started a detached process."""
    if in_lab and not available()[0]:
        pytest.skip(available()[1])
    argv = [sys.executable, "-c", LAUNCHER, token, str(tmp_path), str(in_lab), DETACH]
    launcher = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    _, namespace, forked = launcher.stdout.readline().split()
    assert len(with_token(token)) >= 4
    holder_pids = helpers_of(launcher.pid)
    os.kill(launcher.pid, number)
    assert launcher.wait(timeout=15) == code
    launcher.stdout.close()
    try:
        assert wait_for(lambda: with_token(token) == [int(forked)], 5)
    finally:
        os.kill(int(forked), signal.SIGKILL)
    assert wait_for(lambda: not helpers_of(launcher.pid), 5)
    if in_lab:
        assert wait_for(lambda: not still_held(namespace, holder_pids), 5)
