"""Shorter searches for tests with real layers, and a clock that only they advance.

`test_search.py` has searches of full length.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from megatron_overlap.autotune import search, tuner


def few_trials() -> Any:
    """Two trials of each candidate in the first round, instead of five."""
    return patch.object(search, "FIRST_TRIALS", 2)


@contextmanager
def one_trial() -> Iterator[None]:
    """One trial of each candidate in the first round, where the test gives the times."""
    with patch.object(search, "FIRST_TRIALS", 1), patch.object(tuner, "_MIN_CALLS", 1):
        yield


class Clock:
    """The clock of the autotuner of a rank. A reading takes a microsecond, layers as long as the test says.

    A busy machine changes no time, so a test knows what is selected.
    """

    def __init__(self) -> None:
        self._ns = 0

    def advance(self, seconds: float) -> None:
        """A layer takes so long."""
        self._ns += round(1e9 * seconds)

    def perf_counter_ns(self) -> int:
        """As `time.perf_counter_ns`."""
        self._ns += 1000
        return self._ns

    def of_tuner(self) -> Any:
        """Measurements read this clock in the context."""
        return patch.object(tuner, "time", self)
