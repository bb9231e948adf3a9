"""Heartbeats, by which a rank distinguishes a slow peer from a dead peer after a failed wait, and a watchdog that finds
such a wait where the waiting thread does not end it.
"""

import atexit
import contextlib
import json
import math
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

_LONGEST_PERIOD_S, _SHORTEST_PERIOD_S = 2.0, 0.1
_MAX_FAILED = 10  # heartbeats in turn; then the store has ended
_STORE_S = 2.0  # deadline of one request to the store, which ends with the rank that hosts it
_LOOK_S = 1.0  # longest time between two looks of a watchdog


class Heartbeat:
    """Publishes the activity of this rank, `doing()`, periodically; each rank overwrites one key of the job's store.

    The period is much shorter than `deadline_s`, that of a wait.
    """

    def __init__(self, store: dist.Store, rank: int, deadline_s: float, doing: Callable[[], str]) -> None:
        self._store = store
        # On the job's own connection a blocking request of the job would delay the heartbeat. torch before 2.8 cannot
        # clone a store: the heartbeat shares the connection, and does not change its timeout.
        if hasattr(store, "clone"):
            self._store = store.clone()
            self._store.set_timeout(timedelta(seconds=_STORE_S))
        self._rank, self._doing, self._count, self._failure = rank, doing, 0, ""
        self.period_s = min(_LONGEST_PERIOD_S, max(_SHORTEST_PERIOD_S, deadline_s / 20))
        self._stop = threading.Event()
        self._publish()
        self._thread = threading.Thread(target=self._run, name="megatron_overlap_heartbeat", daemon=True)
        self._thread.start()
        # A thread that returns from the store while the interpreter ends aborts the process.
        atexit.register(self.close)

    def close(self) -> None:
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join(timeout=_STORE_S)

    def publish_failure(self, text: str) -> None:
        """Publish the final status message of this rank. Blocks for at most twice the store timeout."""
        self._failure = text
        within(self._publish, 2 * _STORE_S)

    def state_of(self, peer: int) -> str:
        """Return in words whether `peer` is alive and what it does. Blocks for at most a few periods."""
        timeout_s = 3 * self.period_s + _STORE_S
        return within(lambda: self._observe(peer), timeout_s) or "state unknown: the job's store does not respond"

    def _observe(self, peer: int) -> str:
        first = self._read(peer)
        if first is None:
            return "it has never sent a heartbeat"
        if first["failure"]:
            return f"it failed earlier: {first['failure']}"
        until = time.monotonic() + 2.5 * self.period_s
        while time.monotonic() < until:
            time.sleep(self.period_s / 4)
            now = self._read(peer)
            if now is not None and now["count"] != first["count"]:
                failure = f"; it has failed: {now['failure']}" if now["failure"] else ""
                return f"it is alive, {now['doing']}{failure}"
        return f"it has sent no heartbeat since it was {first['doing']}"

    def _read(self, peer: int) -> dict[str, str] | None:
        key = f"heartbeat/{peer}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _run(self) -> None:
        num_failed = 0
        while num_failed < _MAX_FAILED and not self._stop.wait(self.period_s):
            try:
                self._publish()
                num_failed = 0
            except (RuntimeError, TimeoutError):  # the store is busy, or has ended
                num_failed += 1

    def _publish(self) -> None:
        self._count += 1
        note = {"count": str(self._count), "doing": self._doing(), "failure": self._failure}
        self._store.set(f"heartbeat/{self._rank}", json.dumps(note))


class Watchdog:
    """Calls `report` once, when a program has not moved for a deadline, with what it waits for.

    A thread calls `look` periodically, which returns that; None if the program does not wait. Another value shows that
    it has moved. The thread counts looks, not seconds: a stopped process sees no deadline pass.
    """

    def __init__[State](
        self, deadline_s: float, look: Callable[[], State | None], report: Callable[[State], None]
    ) -> None:
        num_looks = max(10, math.ceil(deadline_s / _LOOK_S))
        self._stop = threading.Event()

        def run() -> None:
            last, num_equal = None, 0
            while not self._stop.wait(deadline_s / num_looks):
                seen = look()
                num_equal = num_equal + 1 if seen is not None and seen == last else 0
                last = seen
                if seen is not None and num_equal == num_looks:
                    report(seen)
                    return

        self._thread = threading.Thread(target=run, name="megatron_overlap_watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; not during `report`, which may wait for the store of the job."""
        self._stop.set()
        self._thread.join(timeout=_STORE_S)


def within[T](question: Callable[[], T], seconds: float) -> T | None:
    """Return the result of `question`; None after an error of a store or after the deadline: it may hang."""
    answer: list[T] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError, TimeoutError, ValueError):
            answer.append(question())

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=seconds)
    return answer[0] if answer else None
