"""Helper processes whose owner is gone. There are none, unless a helper was stopped before its owner died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_MARK = "megatron_overlap:"


def start_time(pid: int) -> int | None:
    """Start of a process in clock ticks since boot; with the pid it names it for good. None: dead."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # after the name, which may hold spaces and brackets
    if fields[0] in "ZX":
        return None  # dead, only not yet waited for
    return int(fields[19])


def label() -> str:
    """What this process writes on its helpers' command lines."""
    me = os.getpid()
    return f"{_MARK}mo{me}:{start_time(me)}"


def _owner(command_line: list[bytes]) -> tuple[int, int] | None:
    for word in command_line[:8]:
        text = word.decode(errors="replace")
        if text.startswith(_MARK):
            pid, _, started = text.removeprefix(f"{_MARK}mo").partition(":")
            if pid.isdigit() and started.isdigit():
                return int(pid), int(started)
    return None


def find() -> list[int]:
    """Pids of helpers whose owner no longer lives. Those of a live owner are never among them."""
    found = []
    my_pid_namespace = os.readlink("/proc/self/ns/pid")
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = Path("/proc", entry)
        try:
            owner = _owner((process / "cmdline").read_bytes().split(b"\0"))
            # Inside another container the owner's pid means another process: not ours to judge.
            if owner is None or os.readlink(process / "ns" / "pid") != my_pid_namespace:
                continue
        except OSError:
            continue
        if start_time(owner[0]) != owner[1]:
            found.append(int(entry))
    return found


def remove() -> list[int]:
    """Ends them, and with them what they hold; returns their pids."""
    removed = []
    for pid in find():
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
        removed.append(pid)
    return removed
