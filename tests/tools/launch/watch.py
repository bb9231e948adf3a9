"""Find processes and network namespaces in /proc, independently of the code under test."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path


def new_token() -> str:
    """A word that no other process has on its command line."""
    return f"token{uuid.uuid4().hex}"


def with_token(token: str) -> list[int]:
    """Pids of the other running processes with the word on their command line."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            command_line = Path("/proc", entry, "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if token in command_line:  # the command line of a zombie is empty
            found.append(int(entry))
    return found


def helpers_of(owner: int) -> list[int]:
    """Pids of the helper processes of an owner."""
    return with_token(f"megatron_overlap:mo{owner}:")


def holders(namespace: str) -> list[int]:
    """Pids of the processes in a network namespace (`net:[...]`) or with an open file of it."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        process = Path("/proc", entry)
        try:
            links = [process / "ns" / "net", *(process / "fd").iterdir()]
        except OSError:
            continue
        for link in links:
            try:
                if os.readlink(link) == namespace:
                    found.append(int(entry))
                    break
            except OSError:
                continue
    return found


def still_held(namespace: str, by: list[int]) -> bool:
    """Whether one of the processes `by` still holds the namespace.

    The kernel reuses the number of a namespace at once, so the caller looks up the holders before the end of the lab.
    """
    return bool(set(holders(namespace)) & set(by))


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Wait until the condition holds; False: the time passed."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
