"""Orphaned helper processes, whose owner has ended. They exist only if a helper was stopped when its owner died."""

from __future__ import annotations

import os
import signal
from pathlib import Path

_MARK = "megatron_overlap:"


def start_time(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None: it has ended. Pid and start time are a unique key."""
    try:
        stat = Path("/proc", str(pid), "stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the process name before it may contain spaces and brackets
    if fields[0] in "ZX":
        return None  # a zombie
    return int(fields[19])


def label() -> str:
    """The label that this process puts on the command lines of its helpers: its pid and start time."""
    me = os.getpid()
    return f"{_MARK}mo{me}:{start_time(me)}"


def _owner(command_line: list[bytes]) -> tuple[int, int] | None:
    """Pid and start time in the label of a command line; None: it has no label."""
    for word in command_line[:8]:
        text = word.decode(errors="replace")
        if text.startswith(_MARK):
            pid, _, started = text.removeprefix(f"{_MARK}mo").partition(":")
            if pid.isdigit() and started.isdigit():
                return int(pid), int(started)
    return None


def find() -> list[int]:
    """Pids of the helpers whose owner has ended."""
    found = []
    my_pid_namespace = os.readlink("/proc/self/ns/pid")
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = Path("/proc", entry)
        try:
            owner = _owner((process / "cmdline").read_bytes().split(b"\0"))
            # In another pid namespace the pid of the owner belongs to another process.
            if owner is None or os.readlink(process / "ns" / "pid") != my_pid_namespace:
                continue
        except OSError:
            continue
        if start_time(owner[0]) != owner[1]:
            found.append(int(entry))
    return found


def remove() -> list[int]:
    """Kill the orphaned helpers, which frees their namespaces. Returns their pids."""
    removed = []
    for pid in find():
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
        removed.append(pid)
    return removed
