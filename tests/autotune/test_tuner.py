"""A chooser on real ranks, whose candidates take known times: what is measured, agreed upon, kept and taken back."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.autotune.search import calls_to_choose
from tests.autotune import tuner_workers as cases
from tests.helpers.world import World, assert_same


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_forward_and_backward_count_together(world: World, micro_batches: int) -> None:
    answers = world.run(2, cases.chosen, micro_batches, None, calls_to_choose(3))
    assert_same([served for served, *_ in answers])
    for _, method, us, stock_us in answers:
        assert method == "p2p direct x 1", "the faster backward outweighs the slower forward"
        # Sleeping takes at least as long as asked for; nobody promises how much longer.
        assert us >= 4000
        assert stock_us >= 8000
    assert len({us for _, _, us, _ in answers}) == 1, "ranks report the same figure"


def test_a_candidate_that_is_slow_on_one_rank_is_not_chosen_on_any(world: World) -> None:
    for slow in (0, 2):
        answers = world.run(3, cases.chosen, 1, slow, calls_to_choose(3))
        assert_same([served for served, *_ in answers])
        assert [method for _, method, _, _ in answers] == ["Megatron's own"] * 3


def test_variants_of_the_fused_kernels_are_tried_where_these_win(world: World, tmp_path: Path) -> None:
    answers = world.run(2, cases.refined, str(tmp_path))
    assert_same(answers)
    served, again, tried = answers[0]
    best = "fused stores=staged tiles=other"
    assert served[-20:] == [best] * 20
    assert again == [best] * 5, "it is kept"
    assert {"fused", "p2p direct x 1", "fused spare_sms=8", "fused mover=pull", best} <= {*tried}
    assert not any("ring" in each or "chunk_rows" in each for each in tried), "they change nothing here"


def test_a_choice_that_turns_slower_is_withdrawn_everywhere_and_in_the_next_run(world: World, tmp_path: Path) -> None:
    answers = world.run(2, cases.withdrawn, str(tmp_path))
    assert_same([answer["served"] for answer in answers])
    for answer in answers:
        assert answer["first"].startswith("p2p")
        assert (answer["now"], answer["why"], answer["withdrawals"]) == ("Megatron's own", "withdrawn", 1)
        assert answer["next run"] == ["Megatron's own"] * 5
        assert answer["kept by"] == ["rank0"]


def test_what_another_rank_has_kept_makes_no_difference(world: World, tmp_path: Path) -> None:
    answers = world.run(3, cases.told_by_others, str(tmp_path))
    assert_same(answers)
    last, again = answers[0]
    assert last[0].startswith("p2p")
    assert again == last * 5
