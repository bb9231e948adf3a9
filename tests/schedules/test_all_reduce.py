"""The verifier proves the all-reduce plans and rejects damaged plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules import Chunk, PartLayout, Plan, all_reduce_plan
from tests.schedules.verify import ScheduleError, check

SOME = (1, 2, 3, 4, 5, 8, 13)


def plans(num_ranks: int, **options: Any) -> list[Plan]:
    return [all_reduce_plan(num_ranks, rank, **options) for rank in range(num_ranks)]


def prove(num_ranks: int, num_parts: int, split: str, gathers: str) -> None:
    proof = check(plans(num_ranks, chunks_per_rank=num_parts, split=split, gathers=gathers))
    others = num_ranks - 1
    assert proof.num_messages == 2 * others * num_parts
    assert proof.tail_free
    # Only the sums of the last part follow the last GEMM; with `after` all sums do.
    assert proof.num_after_gemms == others * (1 if gathers == "between" else num_parts)


@pytest.mark.parametrize("gathers", ["between", "after"])
@pytest.mark.parametrize(
    "sizes", [(16, 31, 64), pytest.param(range(1, 65), marks=pytest.mark.long)], ids=["some", "all"]
)
def test_proved_for_every_group_size(gathers: str, sizes: Sequence[int]) -> None:
    for num_ranks in sizes:
        prove(num_ranks, 3 if num_ranks in SOME else 1, "edge", gathers)


@pytest.mark.parametrize("gathers", ["between", "after"])
@pytest.mark.parametrize("split", ["all", "edge"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4])
def test_proved_for_every_split(split: str, gathers: str, num_parts: int) -> None:
    for num_ranks in SOME:
        prove(num_ranks, num_parts, split, gathers)


@pytest.mark.parametrize("gathers", ["between", "after"])
@pytest.mark.parametrize("slices", [2, 3, 4])
def test_owners_that_share_a_gemm_are_proved(slices: int, gathers: str) -> None:
    for num_ranks in SOME:
        group = plans(num_ranks, split="all", gathers=gathers, slices_per_gemm=slices)
        assert check(group).num_after_gemms == num_ranks - 1
        size = max(size for size in (1, 2, 4) if size <= slices and num_ranks % size == 0)
        for plan, alone in zip(group, plans(num_ranks, split="all", gathers=gathers), strict=True):
            sizes = [len(work.chunks) for work in plan.work if work.chunks]
            assert max(sizes) <= size
            assert len(sizes) == num_ranks // size + size.bit_length() - 1
            assert {(m.send, m.to) for m in plan.messages} == {(m.send, m.to) for m in alone.messages}
            assert {(m.recv, m.source) for m in plan.messages} == {(m.recv, m.source) for m in alone.messages}
    with pytest.raises(ValueError, match="slices_per_gemm: 2: needs pattern direct and chunks_per_rank 1"):
        plans(4, chunks_per_rank=2, split="all", slices_per_gemm=2)


def test_serial_is_correct_but_not_tail_free() -> None:
    proof = check(plans(4, chunks_per_rank=2, pattern="serial"))
    assert not proof.tail_free
    assert proof.num_after_gemms == proof.num_messages


def test_others_rows_first_own_rows_last() -> None:
    plan = all_reduce_plan(4, 1, chunks_per_rank=3)
    assert [[chunk.owner for chunk in work.chunks] for work in plan.work] == [
        *([2], [3], [0], [1]),
        [0, 1, 2, 3],
        [],
        *([2, 3], [0]),
        [],
        [1],
        [],
    ]
    assert plan.messages[0].after_work == 1


@pytest.mark.parametrize("gathers", ["between", "after"])
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_damaged_plan_is_caught(num_ranks: int, gathers: str) -> None:
    """The verifier rejects every single change to the plan of one rank: peer, chunk, dropped wait or add, order."""
    good = plans(num_ranks, chunks_per_rank=2, gathers=gathers)
    check(good)
    damaged = damage(good[1])
    assert len(damaged) > 20
    for plan in damaged:
        with pytest.raises(ScheduleError):
            check([good[0], plan, *good[2:]])


def damage(plan: Plan) -> list[Plan]:
    damaged = []
    for index, message in enumerate(plan.messages):
        before, after = plan.messages[:index], plan.messages[index + 1 :]
        changes: list[dict[str, Any]] = [
            {"recv": Chunk(message.recv.owner, 1 - message.recv.part)},
            {"send": Chunk(message.send.owner, 1 - message.send.part)},
            {"to": plan.rank},
        ]
        changes.append({"after_work": message.after_work - 1})
        for change in changes:
            changed = dataclasses.replace(message, **change)
            damaged.append(dataclasses.replace(plan, messages=(*before, changed, *after)))
        damaged.append(dataclasses.replace(plan, messages=before + after))
    for index, unit in enumerate(plan.work):
        before, after = plan.work[:index], plan.work[index + 1 :]
        if unit.adds:
            damaged.append(
                dataclasses.replace(plan, work=(*before, dataclasses.replace(unit, adds=unit.adds[1:]), *after))
            )
        damaged.append(dataclasses.replace(plan, work=before + after))
        damaged.append(dataclasses.replace(plan, work=(*before, unit, unit, *after)))
    return damaged


def test_an_incomplete_sum_is_caught() -> None:
    """Sender and receiver match, but the message would overwrite a partial sum that is not sent."""
    good = plans(2)
    gather, reduce = good[0].messages[1], good[0].messages[0]
    early = [
        dataclasses.replace(plan, messages=tuple(dataclasses.replace(e, after_work=0) for e in reversed(plan.messages)))
        for plan in good
    ]
    assert (gather.send, reduce.send) == (Chunk(0, 0), Chunk(1, 0))
    with pytest.raises(ScheduleError, match="which it does not hold"):
        check(early)


def test_missing_sums_are_caught() -> None:
    """A reduce-scatter alone: all messages match, but no rank receives the sums of other owners."""
    reduce_scatters = []
    for plan in plans(3):
        reduces = tuple(message for message in plan.messages if message.recv.owner == plan.rank)
        reduce_scatters.append(dataclasses.replace(plan, messages=reduces))
    with pytest.raises(ScheduleError, match="rank 0: never receives the sum of"):
        check(reduce_scatters)


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 9))
def test_layout_covers_every_row_once_part_by_part(num_rows: int, num_ranks: int, num_parts: int) -> None:
    layout = PartLayout(num_rows, num_ranks, num_parts)
    rows = []
    for part in range(num_parts):
        sizes = []
        for owner in range(num_ranks):
            start, stop = layout.rows(Chunk(owner, part))
            assert layout.num_chunk_rows(Chunk(owner, part)) == stop - start
            sizes.append(stop - start)
            rows += range(start, stop)
        assert max(sizes) - min(sizes) <= 1
    assert rows == list(range(num_rows))


@settings(max_examples=30)
@given(st.integers(1, 12), st.integers(1, 6), st.sampled_from(["edge", "all"]), st.sampled_from(["between", "after"]))
def test_any_size_is_proved(num_ranks: int, num_parts: int, split: str, gathers: str) -> None:
    prove(num_ranks, num_parts, split, gathers)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("num_ranks", {"num_ranks": 65, "rank": 0}),
        ("rank", {"num_ranks": 2, "rank": 2}),
        ("chunks_per_rank", {"chunks_per_rank": 0}),
        ("pattern", {"pattern": "tree"}),
        ("pattern", {"pattern": "ring"}),
        ("split", {"split": "some"}),
        ("gathers", {"gathers": "never"}),
    ],
)
def test_invalid_arguments_name_the_argument(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        all_reduce_plan(**{"num_ranks": 2, "rank": 0, **options})
