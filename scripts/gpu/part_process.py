"""Runs one part of a measurement in a process of its own, with a deadline, and keeps the rows that it has printed.

Shared by first_contact.py and node.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ENDED, INTERRUPTED = "ended", "interrupted"
BAD_ROWS = 3
"""Exit code of a process that has run to its end and has printed a bad row. An exception exits with 1."""
POLL_S = 0.1
KILL_S = 10.0
"""From SIGKILL until a process is left behind."""
SHARED_GPU_ENV = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Of ranks that share one GPU, by NCCL 2.30.3 and later."""


def run_process(
    command: Sequence[str],
    environment: Mapping[str, str],
    limit_s: float,
    stop: Callable[[], str] = lambda: "",
) -> dict[str, Any]:
    """Run `command` until it ends, for at most `limit_s`.

    Args:
        command: prints one JSON object for each row, at least one. It exits with 0, or with `BAD_ROWS`; see `is_bad`.
        environment: all environment variables of the process.
        limit_s: then the process and all processes that it started are killed.
        stop: called between polls. A text kills the process and is the reason.

    Returns:
        `rows`, `how` the process ended (`ended` unless it failed), `seconds`, `wrong_rows`, and `stderr` if it failed.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, env=dict(environment), start_new_session=True)
        how = ENDED
        try:
            while how == ENDED and child.poll() is None:
                if time.perf_counter() - start > limit_s:
                    how = f"killed after {limit_s:.0f} s: a deadlock, or too much to do"
                else:
                    how = stop() or ENDED
                    time.sleep(POLL_S)
            if how == ENDED and (code := child.wait()) not in (0, BAD_ROWS):
                how = f"exit code {code}"
        except (KeyboardInterrupt, SystemExit):
            how = INTERRUPTED
        finally:
            # The whole session: ranks that are processes, too.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            # A process whose driver hangs does not end: the other parts run without it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(KILL_S)
        out.seek(0)
        err.seek(0)
        rows = [row for line in out if (row := parsed(line)) is not None]
        error = err.read()[-3000:]
    found: dict[str, Any] = {"rows": rows, "how": how, "seconds": time.perf_counter() - start}
    found["wrong_rows"] = sum(is_bad(row) for row in rows)
    if how == ENDED and not rows:
        found["how"] = "failed: it printed nothing"
    if found["how"] != ENDED:
        found["stderr"] = error
    return found


def triton_cache() -> dict[str, str]:
    """A folder for the kernels that Triton compiles, where it cannot write to its own."""
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    if "TRITON_CACHE_DIR" in os.environ or os.access(home, os.W_OK):
        return {}
    return {"TRITON_CACHE_DIR": str(Path(tempfile.gettempdir()) / f"triton-{os.getuid()}")}


def is_bad(row: Mapping[str, Any]) -> bool:
    """Whether a row says that a result was wrong."""
    return bool(
        row.get("wrong") or row.get("gave_up") or row.get("failed") or not row.get("right", True)
    ) or not row.get("mutant_noticed", True)


def parsed(line: str) -> dict[str, Any] | None:
    """Return a row; None for a line that was cut off when its process ended, or that a library printed."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def device_text() -> str:
    """Name, driver, clock and power limit of the devices, without a CUDA context in this process."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"


def save(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Write `figures` as JSON: the whole file, or, if this process ends meanwhile, the file before."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps(figures, indent=1) + "\n")
    beside.replace(path)
