"""Calls without a backward pass under `method: auto`: a threshold by rows, no trials, counts of their own."""

from __future__ import annotations

import math

import pytest

from megatron_overlap.adapters.tensor_parallel import forward_only
from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import forward_only_workers as workers
from tests.adapters.tensor_parallel.forward_only_workers import THRESHOLD, Counts
from tests.helpers.world import World, assert_same

OPS = {("column", False): "ag_gemm", ("row", False): "gemm_rs", ("row", True): "gemm_ar"}
WITHOUT_BACKWARD = ("no_grad", "inference_mode", "frozen")


@pytest.mark.parametrize(
    ("kind", "plain", "how"),
    [
        # The daily run has each operation, and each way to run without a backward pass, once.
        pytest.param(*layer, how, id=f"{op}-{how}", marks=[] if daily == how else [pytest.mark.long])
        for (layer, op), daily in zip(OPS.items(), WITHOUT_BACKWARD, strict=True)
        for how in WITHOUT_BACKWARD
    ],
)
def test_ragged_prompts_run_p2p_and_decode_the_stock_path(ranks: World, kind: str, plain: bool, how: str) -> None:
    prompts = [THRESHOLD, 2 * THRESHOLD, THRESHOLD + 8, 3 * THRESHOLD, 10 * THRESHOLD]
    decode = [8, 8, THRESHOLD - 8, 8]
    answers = ranks.run(RANKS, workers.sizes, kind, plain, [*prompts, *decode, THRESHOLD], how)
    assert_same([ran for ran, *_ in answers])
    op = OPS[kind, plain]
    for ran, counted, kinds, decided in answers:
        assert [each.split()[1] for each in ran] == ["p2p"] * (len(prompts) + 1), (
            "a prompt registers the layer: no decode call runs through the autotuner, not even the first"
        )
        count = counted[op, "forward only"]
        assert (count.overlapped, count.stock, count.not_communicating) == (len(prompts) + 1, len(decode), 0)
        assert list(counted) == [(op, "forward only")]
        assert kinds == 0, "nothing is measured for shapes that do not repeat"
        assert decided == len(prompts), "the last call has the rows of the first prompt"


def test_a_decode_call_neither_runs_the_autotuner_nor_exchanges_anything(ranks: World) -> None:
    assert ranks.run(RANKS, workers.other_tuner) == [0] * RANKS


def test_repeated_rows_are_measured_and_a_better_p2p_stays(ranks: World) -> None:
    answers = ranks.run(RANKS, workers.repeated, False)
    assert_same([ran for ran, _, _ in answers])
    ran, lines, others = answers[0]
    first = workers.TRIAL_CALLS + workers.RECHECK
    assert ran[:first] == ["gemm_rs p2p direct x 1"] * first
    assert "gemm_rs stock" in ran
    assert ran[-5:] == ["gemm_rs p2p direct x 1"] * 5
    assert others == ["gemm_rs p2p direct x 1"] * 2
    assert lines[0]["method"] == "p2p direct x 1"
    assert lines[1]["method"] == f"p2p from {THRESHOLD} rows on"
    assert lines[1]["reason"].startswith("modelled: GEMM ")


def test_a_faster_stock_path_raises_the_threshold(ranks: World) -> None:
    answers = ranks.run(RANKS, workers.repeated, True)
    assert_same([ran for ran, _, _ in answers])
    ran, lines, others = answers[0]
    assert ran[-1] == "gemm_rs stock"
    assert len(ran) < 60, "once selected, the stock path needs no autotuner"
    assert others == ["gemm_rs p2p direct x 1"], "fewer rows follow the measured ones, more do not"
    assert lines[0]["reason"].startswith("reverted")
    assert lines[1]["method"] == f"p2p from {2 * THRESHOLD + 1} rows on"
    assert "measured: none is faster with fewer rows" in lines[1]["reason"]


def test_all_ranks_agree_on_what_they_measure(ranks: World) -> None:
    answers = ranks.run(RANKS, workers.measures)
    assert_same(answers)
    assert [op for op, *_ in answers[0]] == ["ag_gemm", "gemm_rs", "gemm_ar"]
    for _, rows, latency_us, rate, gemm_us, p2p_us in answers[0]:
        assert rows > RANKS
        assert 1 < latency_us < 1e6
        assert rate > 1, "noise may hide the difference between few and many bytes: then nothing is overlapped"
        assert 0 <= gemm_us < 1e5
        assert 1 < p2p_us < 1e6
        assert not math.isnan(rows)


def test_each_measured_call_of_the_link_communicates(ranks: World) -> None:
    calls = sum(1 + repeats for repeats in forward_only._REPEATS.values())
    ops = "all_gather_linear", "linear_reduce_scatter", "linear_all_reduce"
    assert ranks.run(RANKS, workers.measured_messages) == [dict.fromkeys(ops, calls)] * RANKS


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
@pytest.mark.parametrize("method", ["p2p", "auto"])
def test_forward_only_calls_are_counted_apart_from_training(ranks: World, method: str, plain: bool) -> None:
    for counted in ranks.run(RANKS, workers.apart, method, plain):
        for op in ("copy_gemm", "gemm_ar") if plain else ("ag_gemm", "gemm_rs"):
            training, only = counted[op, "forward"], counted[op, "forward only"]
            assert training.overlapped + training.stock == 3, "two steps and one recomputation"
            silent = 3 if op == "copy_gemm" else 0
            assert only.overlapped + only.stock == 3 - silent
            assert only.not_communicating == silent
            assert training.not_communicating == 0
            if method == "p2p":
                assert (training.overlapped, only.overlapped) == (3, 3 - silent)


def test_a_layer_that_communicates_nothing_in_a_call_is_no_fallback(ranks: World) -> None:
    for counted in ranks.run(RANKS, workers.silent_layer):
        assert counted == {
            ("copy_gemm", "forward"): Counts(0, 0, 1, 0),
            ("copy_gemm", "forward only"): Counts(0, 0, 1, 0),
        }
