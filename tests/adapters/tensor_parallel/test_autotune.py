"""`method: auto` on Megatron's layers: all ranks run the same candidate in each call, and the results hold."""

from __future__ import annotations

import pytest

from megatron_overlap.autotune.search import CALLS_PER_TRIAL
from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import autotune_workers as workers
from tests.adapters.tensor_parallel.autotune_workers import BlockCase
from tests.helpers.world import World, assert_same


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
@pytest.mark.parametrize("chunks", [1, pytest.param("auto", marks=pytest.mark.long)])
def test_ranks_run_the_same_candidates_and_results_hold(ranks: World, chunks: int | str, plain: bool) -> None:
    calls = workers.FEW_CALLS if chunks == 1 else workers.CALLS
    answers = ranks.run(RANKS, workers.trained, ["column", "row"], plain, calls, chunks_per_rank=chunks)
    assert_same([ran for ran, _, _ in answers])
    ran, lines, table = answers[0]
    assert len(set(ran)) >= 4, "only one candidate was ever measured"
    assert any("stock" in each for each in ran)
    assert_same([[line["method"] for line in lines] for _, lines, _ in answers])
    assert [line["op"] for line in lines] == (["copy_gemm"] if plain else ["ag_gemm", "gemm_rs"])
    for line in lines:
        assert line["ms"] > 0
        assert line["stock_ms"] > 0
        assert line["gain"] == pytest.approx(line["stock_ms"] / line["ms"] - 1)
        assert line["method"] in table
    if plain:
        # One layer computes what another one deferred, so both run the same candidate, call by call.
        pairs = list(zip(ran[::2], ran[1::2], strict=True))
        assert all(first.removeprefix("copy_gemm") == second.removeprefix("gemm_ar") for first, second in pairs)


def test_evaluation_and_recomputation_are_tuned_separately(ranks: World) -> None:
    lines = ranks.run(RANKS, workers.evaluated)[0]
    assert [line["passes"] for line in lines] == ["forward", "forward, backward", "forward only"]
    assert [line["ms"] is not None for line in lines] == [True, True, False], "evaluation is modelled at first"


def test_local_layers_with_gradient_accumulation_fusion_are_not_measured_on_a_cpu(ranks: World) -> None:
    for excluded in ranks.run(RANKS, workers.accumulates):
        assert "adds to main_grad on CUDA only" in excluded["autotuning"]


def test_both_passes_of_torch_checkpoint_run_the_same_candidate(ranks: World) -> None:
    for excluded in ranks.run(RANKS, workers.recomputed_by_torch):
        assert "torch.utils.checkpoint recomputes the layer" in excluded["autotuning"]


def test_a_user_without_a_home_folder_has_no_cache(ranks: World) -> None:
    assert ranks.run(RANKS, workers.folder_without_home) == [None] * RANKS


@pytest.mark.parametrize("kind", ["column", "row"])
def test_calls_of_a_selected_stock_path_skip_the_autotuner_and_are_counted(ranks: World, kind: str) -> None:
    for calls in ranks.run(RANKS, workers.free_calls, kind):
        assert calls.searched == calls.counted == workers.FREE_CALLS
        assert calls.through_run == 0, "until the recheck nothing is timed"
        assert calls.other == [0, 0, 2]


def test_groups_that_are_made_again_are_measured_again(ranks: World) -> None:
    for before, after in ranks.run(RANKS, workers.groups_made_again):
        assert before == after == ["forward, backward", "forward only"]


def test_a_step_that_an_error_ended_leaves_no_state_to_the_next_forward(ranks: World) -> None:
    for found in ranks.run(RANKS, workers.interrupted_recomputation):
        assert found == [("batch", True), ("none", False)] * 2


def test_ranks_that_run_different_layers_get_an_error(ranks: World) -> None:
    for text in ranks.run(RANKS, workers.different_layers):
        assert "run different layers: ag_gemm 32x16x12 float32 backward by stock, p2p" in text
        assert " | ag_gemm 36x16x12" in text


@pytest.mark.parametrize(
    ("case", "wins"),
    [
        pytest.param(BlockCase(), True, marks=pytest.mark.long),
        (BlockCase(last_stage=True), True),
        (BlockCase(split_us=300), False),
        pytest.param(BlockCase(sequence_parallel=True), True, marks=pytest.mark.long),
        pytest.param(BlockCase(sequence_parallel=True, split_us=300), False, marks=pytest.mark.long),
        (BlockCase(sequence_parallel=True, batch=1), True),
        (BlockCase(sequence_parallel=True, recompute=True), True),
        pytest.param(BlockCase(sequence_parallel=True, recompute=True, split_us=300), False, marks=pytest.mark.long),
        pytest.param(BlockCase(recompute=True), True, marks=pytest.mark.long),
        pytest.param(BlockCase(sequence_parallel=True, batch=1, split_us=300), False, marks=pytest.mark.long),
    ],
    ids=[
        "faster",
        "faster-on-a-later-stage",
        "slower",
        "sp-faster",
        "sp-slower",
        "sequence-faster",
        "recomputed-faster",
        "recomputed-slower",
        "recomputed-no-sp-faster",
        "sequence-slower",
    ],
)
def test_a_block_is_measured_in_batch_overlap(ranks: World, case: BlockCase, wins: bool) -> None:
    answers = ranks.run(RANKS, workers.block, case)
    assert_same([run.split for run in answers])
    assert_same([run.lines for run in answers])
    run = answers[0]
    *layers, block = run.lines
    ops = ["ag_gemm", "gemm_rs", "ag_gemm", "gemm_rs"] if case.sequence_parallel else ["copy_gemm"]
    # The first pass of recomputation is a kind of calls of its own.
    assert [line["op"] for line in run.lines] == [*ops * (2 if case.recompute else 1), "block"]
    assert {line["method"] for line in layers} == {"p2p direct x 1" if case.sequence_parallel else "p2p x 1"}
    overlap, variant = ("sequence overlap", " by sequences") if case.batch == 1 else ("batch overlap", "")
    assert block["module"] == f"block 16->16 of 2 layers{variant}"
    assert block["method"] == (overlap if wins else "separate layers")
    assert block["reason"] == ("faster than separate layers" if wins else f"none is faster: {overlap}")
    assert block["gain"] == pytest.approx(1.0 if wins else 0.0)
    assert len(run.split) < case.calls
    assert run.split[-6:] == [wins] * 6
    assert sum(run.split) >= CALLS_PER_TRIAL
    assert not any(split for split, waits in zip(run.split, run.without_selection, strict=True) if waits)
    assert run.paused == case.recompute, "only these layers have close candidates"
    reasons = {line["reason"] for line in layers}
    assert ("not measured to the end: its block runs in batch overlap" in reasons) == (run.paused and wins)
    assert run.timed_outside == 0, "an output layer after the block runs the selected candidate, untimed"


def test_a_block_does_not_wait_for_the_output_layer(ranks: World) -> None:
    assert ranks.run(RANKS, workers.block_beside_output_layer) == [(True, True)] * RANKS


def test_a_block_that_does_not_support_batch_overlap_has_a_reason_and_no_fallback(ranks: World) -> None:
    run = ranks.run(RANKS, workers.block, BlockCase(batch=3, calls=16))[0]
    assert [line["op"] for line in run.lines] == ["copy_gemm"]
    assert not any(run.split)
    assert run.not_overlapped["batch overlap"] == "a micro-batch of 3 does not split into two equal parts"
