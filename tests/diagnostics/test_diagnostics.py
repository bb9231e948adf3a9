"""Ranks that differ are told so, failed waits say everything that is known, what is ordered has the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.diagnostics.consistency import differences
from tests.diagnostics import workers as cases
from tests.helpers.world import World, assert_same


def test_differences_name_key_values_and_ranks() -> None:
    facts = {rank: {"a": "1", "b": "x" if rank == 3 else "y"} for rank in range(5)}
    assert differences(facts) == "b: y on rank 0-2, 4, x on rank 3"
    assert differences({0: {"a": "1"}, 1: {"a": "1"}}) == ""
    assert differences({0: {"a": "1"}, 1: {}}) == "a: 1 on rank 0, nothing on rank 1"


def test_many_differences_are_counted() -> None:
    text = differences({rank: {f"key{number:02}": str(rank) for number in range(11)} for rank in range(2)})
    assert text.endswith("; and 3 more")
    assert text.count(" on rank 0") == 8


def test_all_ranks_are_told_the_same(world: World) -> None:
    same, odd = {"chunks": "2"}, {"chunks": "4"}
    assert [text for text, _ in world.run(4, cases.says, [same] * 4, 5.0)] == [""] * 4
    told = [text for text, _ in world.run(4, cases.says, [same, same, odd, same], 5.0)]
    assert told == ["chunks: 2 on rank 0-1, 3, 4 on rank 2"] * 4


@pytest.mark.parametrize("silent", [0, 2])
def test_a_silent_rank_is_named_within_the_deadline(world: World, silent: int) -> None:
    said = [None if rank == silent else {"a": "1"} for rank in range(3)]
    answers = world.run(3, cases.says, said, 0.5)
    for rank, (text, took) in enumerate(answers):
        if rank != silent:
            assert text.startswith(f"rank {silent}")
            assert took < 8
    assert_same([text for rank, (text, _) in enumerate(answers) if rank != silent])


def test_signs_of_life(world: World) -> None:
    heard, _ = world.run(2, cases.signs_of_life)
    assert heard["never"] == "it has never given a sign of life"
    assert heard["alive"] == "it is alive, at step 8"
    assert heard["silent"] == "it gives no sign of life since it was at step 8"
    assert heard["said"] == "it had ended itself: waited in vain"


@pytest.mark.parametrize("backward", [False, True])
def test_a_failed_wait_says_everything(world: World, tmp_path: Path, backward: bool) -> None:
    (text, content, second), _ = world.run(2, cases.failed_wait, str(tmp_path), backward)
    op, step = ("all_gather_linear", 6 if backward else 5)
    assert text.startswith(f"{op}{' wgrad' if backward else ''}: rank 0 could not "), text
    assert "chunk 0 of rank" in text
    assert "rank 1 within 1 s: " in text
    assert f"layer layers.1, step {step}; rank 1: it is alive, at step {step}, in no op of the plugin" in text
    assert text.endswith(f"the last steps are in {tmp_path}/overlap-failure-rank0.json")
    assert content["message"] == text.rpartition("; the last steps are in")[0]
    assert content["version of x"] == "1"
    operations = content["operations"]
    assert operations[-1]["step"] == step  # type: ignore[index]
    assert operations[-1]["ended"] is None  # type: ignore[index]
    assert any("ops/tensor_parallel/linear.py" in line for line in content["stack"])  # type: ignore[attr-defined]
    assert f"after an earlier failure, see {tmp_path}" in second or second == text


def test_a_wait_that_no_message_ends_has_a_deadline_too(world: World) -> None:
    for text, took in world.run(2, cases.a_dead_thread):
        assert "nothing has moved in all this time" in text
        assert took < 5


def test_a_peer_that_never_connects_is_an_error(world: World) -> None:
    text, _ = world.run(2, cases.peer_that_never_connects)
    assert text.startswith("rank 0 could not connect to all of ranks 0, 1 within 1 s: ")


def test_ordered_bits_do_not_depend_on_who_comes_late(world: World) -> None:
    early = [0.0, 0.0, 0.0]
    plain = world.run(3, cases.bits, True, early)
    assert [told for _, told in plain] == [False] * 3
    for late in ([0.1, 0.0, 0.0], [0.0, 0.15, 0.05]):
        assert world.run(3, cases.bits, True, late) == plain
