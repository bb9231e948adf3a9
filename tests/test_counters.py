"""Counters: saved activations, strict fallbacks, and counting from several threads."""

from __future__ import annotations

import threading

import pytest

from megatron_overlap.counters import Counters, FallbackError, SavedActivations, SavedSite

QKV, UP = SavedSite("column", "8->4", "ag_gemm"), SavedSite("column", "8->6", "ag_gemm")


def test_a_shared_shard_counts_once() -> None:
    counter = SavedActivations()
    releases = [counter.save(QKV, 1, 10), counter.save(UP, 1, 10), counter.save(QKV, 2, 5)]
    assert counter.live_bytes == 15
    releases[0]()
    assert counter.live_bytes == 15
    releases[1]()
    assert counter.live_bytes == 5
    releases[2]()
    assert counter.live_bytes == 0
    memory = counter.snapshot()
    assert memory.peak_bytes == 15
    assert memory.calls == ((QKV, 10), (UP, 10))


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
