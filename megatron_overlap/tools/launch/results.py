"""One rank to start, and how a job of them ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OnLine = Callable[[int, str], None]


@dataclass(frozen=True)
class RankCommand:
    """One rank to start.

    Attributes:
        rank: its number in the job; names it in messages and its log.
        argv: the whole command line.
        env: added to the launcher's environment.
        host: where it runs, for messages.
        cwd: folder to start in; None: the launcher's.
    """

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
    """All ranks ended with exit code 0."""

    logs: tuple[Path, ...]
    wall_s: float


class RunError(RuntimeError):
    """The job did not end well. All its processes are gone."""


class RankFailed(RunError):  # noqa: N818
    """A rank ended with an exit code other than 0 or by a signal; the first one, when several did.

    Attributes:
        end: that rank.
        others: ranks that had failed as well before they were told to end.
    """

    def __init__(self, end: RankEnd, others: Sequence[RankEnd] = ()) -> None:
        self.end = end
        self.others = tuple(others)
        text = [f"rank {end.rank} on {end.host}: {end.describe()}; all ranks ended; log: {end.log}"]
        text += [f"  | {line}" for line in end.last_lines] or ["  | (it printed nothing)"]
        if others:
            text.append("after it: " + ", ".join(f"rank {o.rank} ({o.describe()})" for o in others))
        super().__init__("\n".join(text))


class RunTimeout(RunError):  # noqa: N818
    """The job took longer than it was given.

    Attributes:
        running: ranks that had not ended.
    """

    def __init__(self, timeout_s: float, last_lines: Mapping[int, Sequence[str]]) -> None:
        self.running = tuple(last_lines)
        ranks = ", ".join(map(str, self.running))
        text = [f"not done after {timeout_s:g} s: ranks {ranks} were running; all ended"]
        for rank, lines in last_lines.items():
            text.append(f"  rank {rank} | {lines[-1] if lines else '(it printed nothing)'}")
        super().__init__("\n".join(text))
