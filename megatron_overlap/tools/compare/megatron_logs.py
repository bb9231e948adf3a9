"""Finished Megatron logs as sides of a comparison: lines of iterations, and the dump of the arguments. Pure.

Checked with Megatron-LM 0.16.1 and 0.19: `training_log` in `megatron/training/training.py` writes one line for every
`--log-interval` iterations, with fields separated by `|`. Releases differ in the other fields. The plugin need not have
been active.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from megatron_overlap.config.errors import usage_error
from megatron_overlap.tools.compare.comparison import WARM_UP_ITERATIONS, Side, Workload
from megatron_overlap.tools.compare.flops import Peak
from megatron_overlap.tools.launch.command import logged_iteration
from megatron_overlap.tools.launch.run_records import RunRecord

_ARGUMENT = re.compile(r"\b(world_size|seq_length) \.{2,} (\d+)\s*$")

NOT_IN_A_LOG = "not in the log"
NOTES = (
    "Read from finished logs. The runs were not interleaved: other load of the machines changes the ratio.",
    "Step time: as logged by the last rank of Megatron, the mean over --log-interval. The first "
    f"{WARM_UP_ITERATIONS} lines that all logs have are not timed.",
    "A log is one round: p20 and p80 of the speedup equal the median.",
    "Deviation: over the iterations that all logs have. Megatron prints 7 digits of the loss and 3 decimals of the "
    "grad-norm: a grad-norm deviation below 0.0005 / its value is not visible.",
)


@dataclass(frozen=True)
class Log:
    """A finished run: the fields of its lines by iteration, and two arguments from the dump, None without a dump."""

    path: Path
    lines: dict[int, dict[str, float]]
    world_size: int | None
    seq_length: int | None


def read_log(path: Path) -> Log:
    """Read the log of one run. Raises ConfigError if it cannot be read, has no iterations, or has more than one run."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        remedy = f"{(error.strerror or 'cannot be read').lower()}; give the log of a finished run"
        raise usage_error("compare --logs", str(path), remedy) from error
    lines: dict[int, dict[str, float]] = {}
    arguments: dict[str, int] = {}
    for row in text.splitlines():
        if (found := logged_iteration(row)) is None:
            if named := _ARGUMENT.search(row):
                arguments[named[1]] = int(named[2])
            continue
        number, _, fields = found
        line = {name: float(value) for name, value in fields.items()}
        # An equal line is from the output of another rank in the same file.
        if "step_time_ms" not in line or lines.get(number) == line:
            continue
        if lines and number <= max(lines):
            remedy = f"iteration {number} comes after iteration {max(lines)}: give one file for each run"
            raise usage_error("compare --logs", str(path), remedy)
        lines[number] = line
    if not lines:
        remedy = "has no line with `elapsed time per iteration (ms)`; give the output of the last rank of Megatron"
        raise usage_error("compare --logs", str(path), remedy)
    return Log(path, lines, arguments.get("world_size"), arguments.get("seq_length"))


def sides(logs: Sequence[Log], peak_tflops: float | None = None) -> list[Side]:
    """Logs, the reference first, as sides of a comparison of common iterations.

    Raises ConfigError if there are too few, or if the runs have other world sizes, sequence lengths or batch sizes.
    """
    common = sorted(set.intersection(*(set(log.lines) for log in logs)))
    if len(common) <= WARM_UP_ITERATIONS:
        remedy = f"iterations in common with the other logs; at least {WARM_UP_ITERATIONS + 1} are needed"
        raise usage_error("compare --logs", str(logs[-1].path), f"has {len(common)} {remedy}")
    first = _settings(logs[0], common)
    for log in logs[1:]:
        for name, value in _settings(log, common).items():
            expected = first[name]
            if value is not None and expected is not None and value != expected:
                remedy = f"{name} is {value:g}, not {expected:g} as in {logs[0].path}: give runs that train alike"
                raise usage_error("compare --logs", str(log.path), remedy)
    stems = [log.path.stem for log in logs]
    unique = len(set(stems)) == len(stems)
    peak = None if peak_tflops is None else Peak(peak_tflops, "given with --peak-tflops")
    found = []
    for log, stem in zip(logs, stems, strict=True):
        rows = [log.lines[number] for number in common]
        record = RunRecord(
            iterations=tuple(common),
            step_time_ms=tuple(row["step_time_ms"] for row in rows),
            losses=tuple(row.get("loss") for row in rows),
            grad_norms=tuple(row.get("grad_norm") for row in rows),
            peak_memory_bytes=None,
            meta={"device": None, "device_name": NOT_IN_A_LOG, "world_size": log.world_size or NOT_IN_A_LOG},
            report=None,
        )
        link = {"kind": "log", "description": NOT_IN_A_LOG}
        found.append(Side(stem if unique else str(log.path), link, (record,), _workload(log, rows), peak))
    return found


def notes(logs: Sequence[Log]) -> list[str]:
    """How logs are read, after what the figures of these logs do not show: steps without an update or a loss."""
    found = []
    for log in logs:
        if skipped := sum(line.get("skipped", 0) for line in log.lines.values()):
            what = "they updated no weights, and their loss is unknown"
            found.append(f"{log.path}: {skipped:.0f} steps were skipped: {what}.")
        if missing := sum("loss" not in line for line in log.lines.values()):
            found.append(f"{log.path}: {missing} of {len(log.lines)} lines have no loss: Megatron logs no NaN.")
    return [*found, *NOTES]


def _settings(log: Log, common: Sequence[int]) -> dict[str, float | None]:
    """Settings that compared runs must have in common; None where a log does not have one."""
    batches = {f"global batch size of iteration {number}": log.lines[number].get("global_batch") for number in common}
    return {"world_size": log.world_size, "seq_length": log.seq_length, **batches}


def _workload(log: Log, rows: Sequence[Mapping[str, float]]) -> Workload:
    """Tokens if all lines have the same batch size; FLOPs per device as rate x time, which all lines share."""
    batches = {row.get("global_batch") for row in rows}
    batch = batches.pop() if len(batches) == 1 else None
    tokens = int(batch) * log.seq_length if batch is not None and log.seq_length is not None else None
    counted = [row["tflops"] * row["step_time_ms"] * 1e9 for row in rows[WARM_UP_ITERATIONS:] if row.get("tflops")]
    if not counted:
        logged = any("tflops" in row for row in rows)
        missing = "0.0 in the log, which has one decimal" if logged else "not in the log: run with --log-throughput"
        return Workload(tokens, None, missing, log.world_size)
    convention = "as Megatron logged them (--log-throughput), one decimal"
    return Workload(tokens, median(counted) * (log.world_size or 1), convention, log.world_size)
