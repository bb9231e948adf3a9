"""Looks at the machine's real processes and network namespaces from outside of what is tested."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path


def new_token() -> str:
    """A word no other process has on its command line."""
    return f"token{uuid.uuid4().hex}"


def with_token(token: str) -> list[int]:
    """Pids of the living processes that have the word on their command line, this one left out."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            command_line = Path("/proc", entry, "cmdline").read_text(errors="replace")
        except OSError:
            continue
        if token in command_line:  # a zombie's is empty
            found.append(int(entry))
    return found


def helpers_of(owner: int) -> list[int]:
    """Pids of the helper processes that say they belong to that process."""
    return with_token(f"megatron_overlap:mo{owner}:")


def holders(namespace: str) -> list[int]:
    """Pids of processes that are in a network namespace (`net:[...]`) or hold it open."""
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
    """Whether one of those processes still holds it. The kernel gives a namespace's number away again at once, so
    that another test's lab may bear it: who holds it has to be looked up before the end, and asked for after it."""
    return bool(set(holders(namespace)) & set(by))


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether the condition came true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
