"""The threshold of forward-only calls: from how many rows on p2p is worth it, by the cost model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from megatron_overlap.adapters.tensor_parallel.forward_only import MOST_ROWS, Gemm, Link, min_rows
from megatron_overlap.autotune.candidates import Call

GATHER = Call("ag_gemm", 0, 1024, 1536, "bfloat16", backward=False)
SCATTER = Call("gemm_rs", 0, 512, 1024, "bfloat16", backward=False)
REDUCE = replace(SCATTER, op="gemm_ar")
# Two hosts at 0.4 Gbit/s, and a layer whose GEMM takes as long as its messages.
STOCK, P2P = Link(latency_us=300, bytes_per_us=100), Link(latency_us=600, bytes_per_us=100)
GEMM = Gemm(fixed_us=200, row_us=20)


def test_a_line_through_two_times() -> None:
    assert Gemm.fitted(8, 100, 128, 220) == Gemm(92, 1)
    assert Gemm.fitted(8, 100, 128, 90) == Gemm(100, 0), "a shorter time of more rows is noise"
    assert Link.fitted(4096, 100, 104096, 1100) == Link(100, 100)


@pytest.mark.parametrize("call", [GATHER, SCATTER, REDUCE], ids=lambda call: call.op)
def test_decode_is_below_and_prefill_above_the_threshold(call: Call) -> None:
    rows = min_rows(call, 2, 2, STOCK, P2P, GEMM)
    assert 8 < rows < 256
    assert rows == int(rows)


@pytest.mark.parametrize("call", [GATHER, SCATTER, REDUCE], ids=lambda call: call.op)
def test_more_overhead_and_less_to_hide_need_more_rows(call: Call) -> None:
    rows = min_rows(call, 2, 2, STOCK, P2P, GEMM)
    assert min_rows(call, 2, 2, STOCK, replace(P2P, latency_us=3300), GEMM) > 2 * rows
    assert min_rows(call, 2, 2, STOCK, replace(P2P, bytes_per_us=90), GEMM) > rows, "slower messages"
    assert min_rows(call, 2, 2, replace(STOCK, bytes_per_us=1000), replace(P2P, bytes_per_us=1000), GEMM) > rows
    assert min_rows(call, 2, 2, STOCK, P2P, replace(GEMM, row_us=5)) > rows
    assert min_rows(call, 2, 2, STOCK, P2P, replace(GEMM, fixed_us=2000)) > rows, "every part reads the weight again"


def test_faster_messages_need_fewer_rows() -> None:
    rows = [min_rows(GATHER, 2, 2, STOCK, replace(P2P, bytes_per_us=rate), GEMM) for rate in (100, 120, 200, 1e9)]
    assert rows[0] > rows[1] > rows[2] > 8
    assert rows[3] == rows[2], "a time of many bytes that is lost in noise is no fast link"
    hot = replace(P2P, latency_us=1)
    assert min_rows(GATHER, 2, 2, STOCK, hot, GEMM) == min_rows(GATHER, 2, 2, STOCK, STOCK, GEMM)


@pytest.mark.parametrize("call", [GATHER, SCATTER, REDUCE], ids=lambda call: call.op)
def test_parts_that_only_read_the_weight_again_hide_nothing(call: Call) -> None:
    assert min_rows(call, 2, 2, STOCK, STOCK, Gemm(fixed_us=2000, row_us=0)) == math.inf


def test_nothing_to_hide_is_never_overlapped() -> None:
    assert min_rows(GATHER, 2, 2, replace(STOCK, bytes_per_us=1e7), replace(P2P, bytes_per_us=1e7), GEMM) == math.inf
    assert min_rows(GATHER, 2, 2, STOCK, P2P, Gemm(0, 0)) == math.inf


def test_a_gather_sends_its_input_and_a_scatter_its_output() -> None:
    def rows(call: Call) -> float:
        return min_rows(call, 2, 2, STOCK, P2P, GEMM)

    assert rows(replace(GATHER, in_features=4096)) != rows(GATHER) == rows(replace(GATHER, out_features=4096))
    assert rows(replace(SCATTER, in_features=4096)) == rows(SCATTER) != rows(replace(SCATTER, out_features=4096))


def test_the_threshold_is_the_first_row_count_that_gains() -> None:
    rows = min_rows(REDUCE, 4, 2, STOCK, P2P, GEMM)
    # One row more of overhead moves it by rows, not by powers of two.
    moved = min_rows(REDUCE, 4, 2, STOCK, replace(P2P, latency_us=630), GEMM)
    assert rows < moved < 1.5 * rows < MOST_ROWS
