"""Counters: saved activations, strict fallbacks, and counting from several threads."""

from __future__ import annotations

import threading

import pytest

from megatron_overlap.counters import Counters, FallbackError, SavedActivations, SavedSite

QKV, UP = SavedSite("column", "8->4", "ag_gemm"), SavedSite("column", "8->6", "ag_gemm")


def test_a_shared_shard_counts_once_and_gathered_rows_count_for_each_layer() -> None:
    for gathered, peak in ((False, 15), (True, 60)):
        counter = SavedActivations(gathered=gathered)
        releases = [counter.save(QKV, 1, 10, 20), counter.save(UP, 1, 10, 30), counter.save(QKV, 2, 5, 10)]
        assert counter.live_bytes == peak
        releases[0]()
        assert counter.live_bytes == (15 if not gathered else 40)
        releases[1]()
        assert counter.live_bytes == (5 if not gathered else 10)
        releases[2]()
        assert counter.live_bytes == 0
        memory = counter.snapshot()
        assert memory.peak_bytes == peak
        assert memory.calls == ((QKV, 20 if gathered else 10), (UP, 30 if gathered else 10))


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
