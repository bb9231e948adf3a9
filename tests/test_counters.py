"""Counters: strict fallbacks, and counting from several threads."""

from __future__ import annotations

import threading

import pytest

from megatron_overlap.counters import Counters, FallbackError


def test_strict_fallback_names_module_and_reason() -> None:
    with pytest.raises(FallbackError, match=r"row proj: gemm_rs forward: not overlapped: weight is frozen; .*strict"):
        Counters(strict=True).fallback("row", "proj", "gemm_rs", "forward", "weight is frozen")


def test_counters_lose_nothing_between_threads() -> None:
    counters = Counters()

    def count() -> None:
        for _ in range(20_000):
            counters.overlapped("column", "", "ag_gemm", "forward", 1)
            counters.fallback("column", "", "ag_gemm", "forward", "r")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (tally,) = counters.snapshot().values()
    assert (tally.overlapped, tally.moved_bytes, tally.fallbacks) == (80_000, 80_000, {"r": 80_000})
