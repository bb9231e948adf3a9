"""`method: auto` on Megatron's own layers: all ranks serve each call alike, whatever they measured; results hold."""

from __future__ import annotations

import pytest

from tests.adapters.tensor_parallel import autotune_workers as cases
from tests.helpers.world import World, assert_same

RANKS = 4


@pytest.mark.parametrize("plain", [False, True], ids=["sp", "no-sp"])
def test_ranks_serve_alike_and_results_hold_while_choices_switch(ranks: World, plain: bool) -> None:
    answers = ranks.run(RANKS, cases.trained, ["column", "row"], plain, cases.CALLS, None, uneven=True)
    assert_same([served for served, _, _ in answers])
    served, choices, table = answers[0]
    assert len(set(served)) > 4, "only one way was ever tried"
    assert any("Megatron's own" in each for each in served)
    assert_same([[choice["method"] for choice in choices] for _, choices, _ in answers])
    assert [choice["op"] for choice in choices] == (["copy_gemm"] if plain else ["ag_gemm", "gemm_rs"])
    for choice in choices:
        assert choice["ms"] > 0
        assert choice["stock_ms"] > 0
        assert choice["gain"] == pytest.approx(choice["stock_ms"] / choice["ms"] - 1)
        assert choice["method"] in table
    if plain:
        # What one layer puts off another one computes: both are served alike, call by call.
        pairs = list(zip(served[::2], served[1::2], strict=True))
        assert all(first.removeprefix("copy_gemm") == second.removeprefix("gemm_ar") for first, second in pairs)


def test_evaluation_and_recomputation_are_chosen_for_apart(ranks: World) -> None:
    choices = ranks.run(RANKS, cases.evaluated)[0]
    assert [choice["passes"] for choice in choices] == ["forward", "forward, backward"]
    assert all(choice["ms"] for choice in choices)


def test_layers_of_one_input_are_served_alike_and_share_its_gather(ranks: World) -> None:
    served, sent = ranks.run(RANKS, cases.shared_input)[0]
    assert served[::2] == served[1::2]
    p2p = sum("p2p" in each for each in served[::2])
    shard = 8 * 2 * 16 * 4
    assert sent == p2p * (RANKS - 1) * shard


@pytest.mark.parametrize("kind", ["column", "row"])
def test_what_megatron_serves_by_choice_takes_a_short_way_and_is_counted_alike(ranks: World, kind: str) -> None:
    for decided, counted, long, others in ranks.run(RANKS, cases.short_way, kind):
        assert decided == counted == cases.SHORT_CALLS
        assert long == 0, "until it is looked at again nothing is timed"
        # A second column-parallel layer of the same input is served like the first and not decided about.
        assert others == [0, 0, 1 if kind == "column" else 2]


def test_ranks_that_run_different_layers_are_told(ranks: World) -> None:
    for text in ranks.run(RANKS, cases.different_layers):
        assert "run different layers: ag_gemm 64x16x6 float32 backward | ag_gemm 72x16x6" in text
