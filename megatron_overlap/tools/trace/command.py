"""`megatron-overlap trace`: a run's events as a timeline of all ranks, and what communication was exposed."""

from __future__ import annotations

import gzip
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from megatron_overlap.config import ConfigError
from megatron_overlap.tools.trace.chrome_trace import Clock, chosen, encode, event_files, trace_events
from megatron_overlap.tracing.events import EventFileError, RankEvents, read_events, steps_of
from megatron_overlap.tracing.exposed import Exposed, exposed_in


def trace(
    run_dir: Annotated[Path, typer.Argument(help="Folder of a run that recorded events (overlap.trace: true).")],
    output: Annotated[
        Path | None,
        typer.Option("--output", help="File of the trace, .json or .json.gz; else trace.json.gz in RUN_DIR."),
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", help="FIRST:LAST, or one; either end may be left out. Else all.")
    ] = None,
) -> int:
    """Write a Perfetto trace of all ranks on one clock, and print what communication was exposed."""
    first, last = _range(steps)
    found = _read(run_dir)
    console = Console()
    try:
        kept = chosen(found, first, last)
    except ValueError as error:
        raise _wrong("--steps", steps, str(error)) from error
    path = output if output is not None else run_dir / "trace.json.gz"
    facts = {"run": str(run_dir), "clock": "of rank 0; others shifted by measured offsets"}
    try:
        with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as file:
            file.writelines(encode(trace_events(kept), facts))
    except OSError as error:
        raise _wrong("--output", path, f"{error.strerror}; give a file that can be written") from error
    console.print(table(kept))
    for line in notes(found):
        console.print(f"- {line}", highlight=False, soft_wrap=True)
    console.print(f"{path}: open it in https://ui.perfetto.dev", highlight=False, soft_wrap=True)
    return 0


def table(ranks: Sequence[RankEvents]) -> Table:
    """Exposed time by op and direction: mean over steps and ranks, and of the rank that waited longest."""
    by_rank = {found.rank: _per_step(found) for found in ranks}
    count = sum(len(steps) for steps in by_rank.values())
    shown = Table(
        "op", "direction", box=box.SIMPLE_HEAD, title=f"exposed communication, ms a step: {count} steps of ranks"
    )
    for heading in ("mean", "most", "of rank"):
        shown.add_column(heading, justify="right")
    keys = {key: 0.0 for steps in by_rank.values() for step in steps for key in step.by_op}
    rows = []
    for key in keys:
        means = {rank: _mean([step.by_op.get(key, 0.0) for step in steps]) for rank, steps in by_rank.items()}
        rows.append((key, means))
    totals = {rank: _mean([step.total_ms for step in steps]) for rank, steps in by_rank.items()}
    for key, means in [*sorted(rows, key=lambda row: -sum(row[1].values())), (("all", ""), totals)]:
        most = max(means, key=means.__getitem__)
        shown.add_row(*key, f"{_mean(list(means.values())):.2f}", f"{means[most]:.2f}", str(most))
    return shown


def notes(ranks: Sequence[RankEvents]) -> list[str]:
    """What a reader needs to know of the clocks and the files."""
    errors = {found.rank: Clock.of(found).error_ns for found in ranks}
    lines = []
    known = [error for error in errors.values() if error is not None]
    unknown = [str(rank) for rank, error in errors.items() if error is None]
    if known and not unknown:
        lines.append(f"clocks of all ranks agree to {max(known) / 1e3:.0f} us or better")
    if unknown:
        lines.append(f"clocks were not compared with rank 0's, and are taken as equal: ranks {', '.join(unknown)}")
    for found in ranks:
        if not found.whole:
            lines.append(f"rank {found.rank}: its file ends in the middle of a step: the run was cut off there")
    missing = sorted(set(range(max(errors) + 1)) - set(errors))
    if missing:
        lines.append(f"no events of ranks {', '.join(map(str, missing))}")
    return lines


def _per_step(found: RankEvents) -> list[Exposed]:
    return [exposed_in(found, start, stop) for _, start, stop in steps_of(found)]


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _read(run_dir: Path) -> list[RankEvents]:
    files = event_files(run_dir)
    if not files:
        what = "no events in it" if run_dir.is_dir() else "no such folder"
        raise _wrong("RUN_DIR", run_dir, f"{what}; run with overlap.trace=true, and give the folder of that run")
    console = Console(stderr=True)
    listed = track(files.values(), "reading ranks", console=console, transient=True, disable=not console.is_terminal)
    try:
        return [read_events(path) for path in listed]
    except EventFileError as error:
        raise _wrong("RUN_DIR", run_dir, str(error)) from error


def _range(text: str | None) -> tuple[int | None, int | None]:
    if text is None:
        return None, None
    found = re.fullmatch(r"(\d*)(:?)(\d*)", text)
    if found is None or text == ":" or (not found[2] and not found[1]):
        raise _wrong("--steps", text, "write FIRST:LAST, FIRST:, :LAST or one number")
    first = int(found[1]) if found[1] else None
    last = int(found[3]) if found[3] else None if found[2] else first
    return first, last


def _wrong(option: str, value: object, remedy: str) -> ConfigError:
    return ConfigError("command line", f"trace {option}", value, remedy)
