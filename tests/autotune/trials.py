"""Shorter searches for tests with real layers; `test_search.py` has those of full length."""

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
