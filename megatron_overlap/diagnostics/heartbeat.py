"""Signs of life: every rank notes in the job's store what it does, so that another one can tell a slow peer from a dead
one when a wait has failed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 2.0, 0.1
_STORE_S = 2.0
"""The store's own deadline for one question. It may be gone with the rank that holds it."""


class Heartbeat:
    """Notes every so often that this rank lives and what it does. One key a rank in the store, overwritten.

    Args:
        store: of the ranks; a connection of its own is made where the store can do that.
        rank: the own key.
        deadline_s: of a wait; signs of life are much closer together.
        doing: what this rank does now, for people. Called from a thread.
    """

    def __init__(self, store: dist.Store, rank: int, deadline_s: float, doing: Callable[[], str]) -> None:
        # A connection that waits for the store holds up all others who use the same one.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._asking = store.clone() if hasattr(store, "clone") else store
        for mine in (self._store, self._asking):
            mine.set_timeout(timedelta(seconds=_STORE_S))
        self._rank, self._doing = rank, doing
        self.period_s = min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, deadline_s / 20))
        self._beats = 0
        self._last_words = ""
        self._stop = threading.Event()
        self._beat()
        self._thread = threading.Thread(target=self._run, name="megatron_overlap_heartbeat", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._stop.set()
        self._thread.join(timeout=_STORE_S)

    def say(self, last_words: str) -> None:
        """Leaves a text for those who ask about this rank after it has ended. Waits for the store as long as it may."""
        self._last_words = last_words

        def leave() -> str:
            self._beat()
            return ""

        _within(leave, 2 * _STORE_S)

    def of(self, peer: int) -> str:
        """Whether `peer` is alive and what it does, in words. Takes a few periods at most."""
        patience = 3 * self.period_s + _STORE_S
        return _within(lambda: self._look(peer), patience) or "cannot be told: the job's store does not answer"

    def _look(self, peer: int) -> str:
        first = self._read(peer)
        if first is None:
            return "it has never given a sign of life"
        if first["said"]:
            return f"it had ended itself: {first['said']}"
        until = time.monotonic() + 2.5 * self.period_s
        while time.monotonic() < until:
            time.sleep(self.period_s / 4)
            now = self._read(peer)
            if now is not None and now["beats"] != first["beats"]:
                said = f"; it has ended itself: {now['said']}" if now["said"] else ""
                return f"it is alive, {now['doing']}{said}"
        return f"it gives no sign of life since it was {first['doing']}"

    def _read(self, peer: int) -> dict[str, str] | None:
        key = _key(peer)
        if not self._asking.check([key]):
            return None
        found: dict[str, str] = json.loads(self._asking.get(key))
        return found

    def _run(self) -> None:
        while not self._stop.wait(self.period_s):
            try:
                self._beat()
            except (RuntimeError, TimeoutError):
                return  # the store is gone, and with it everybody who could read this

    def _beat(self) -> None:
        self._beats += 1
        note = {"beats": str(self._beats), "doing": self._doing(), "said": self._last_words}
        self._store.set(_key(self._rank), json.dumps(note))


def _key(rank: int) -> str:
    return f"heartbeat/{rank}"


def _within(question: Callable[[], str], seconds: float) -> str:
    """The answer, or nothing if there is none in time: a store that hangs must not hang whoever asks it."""
    answer: list[str] = []

    def ask() -> None:
        try:
            answer.append(question())
        except (RuntimeError, TimeoutError, ValueError):
            answer.append("")

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    return answer[0] if answer else ""
