"""The verifier proves the plans for every supported group size and rejects damaged plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules import (
    Chunk,
    ChunkLayout,
    Plan,
    all_gather_plan,
    reduce_scatter_plan,
)
from megatron_overlap.schedules.plan import Small, part_weights
from tests.schedules.verify import ScheduleError, check, describe

BUILDERS = {"all_gather": all_gather_plan, "reduce_scatter": reduce_scatter_plan}


def plans(collective: str, num_ranks: int, **options: object) -> list[Plan]:
    return [BUILDERS[collective](num_ranks, rank, **options) for rank in range(num_ranks)]  # type: ignore[operator]


DEFAULT_SIZES = [*range(1, 10), 16, 31, 64]


@pytest.mark.parametrize("split", ["all", "edge"])
@pytest.mark.parametrize("pattern", ["ring", "direct"])
@pytest.mark.parametrize("collective", BUILDERS)
@pytest.mark.parametrize(
    ("chunks_per_rank", "sizes"),
    [(2, DEFAULT_SIZES), *(pytest.param(chunks, range(1, 65), marks=pytest.mark.long) for chunks in (1, 2, 3))],
)
def test_proved_for_every_group_size(
    collective: str, pattern: str, split: str, chunks_per_rank: int, sizes: Sequence[int]
) -> None:
    for num_ranks in sizes:
        group = plans(collective, num_ranks, chunks_per_rank=chunks_per_rank, pattern=pattern, split=split)
        proof = check(group)
        assert proof.tail_free
        assert proof.num_messages == (num_ranks - 1) * chunks_per_rank
        assert proof.peak_chunks_in_flight <= proof.num_messages


@pytest.mark.parametrize("slices", [2, 3, 4, 8])
@pytest.mark.parametrize("collective", BUILDERS)
def test_slices_that_share_a_gemm_are_proved(collective: str, slices: int) -> None:
    """All ranks have the same number of GEMMs and the messages of one slice per GEMM, to different ranks at a time."""
    for num_ranks in DEFAULT_SIZES:
        group = plans(collective, num_ranks, split="edge", slices_per_gemm=slices)
        proof = check(group)
        assert proof.tail_free
        assert proof.num_messages == num_ranks - 1
        size = max(size for size in (1, 2, 4, 8) if size <= slices and num_ranks % size == 0)
        for plan, alone in zip(group, plans(collective, num_ranks, split="edge"), strict=True):
            sizes = [len(work.chunks) for work in plan.work if work.chunks]
            assert max(sizes) <= size
            assert len(sizes) == num_ranks // size + size.bit_length() - 1
            assert {(m.send, m.to) for m in plan.messages} == {(m.send, m.to) for m in alone.messages}
            assert {(m.recv, m.source) for m in plan.messages} == {(m.recv, m.source) for m in alone.messages}
        for messages in zip(*(plan.messages for plan in group), strict=True):
            assert {message.to for message in messages} == set(range(num_ranks))


def test_slices_of_one_gemm_are_one_run_of_rows() -> None:
    gather, scatter = all_gather_plan(8, 5, slices_per_gemm=4), reduce_scatter_plan(8, 5, slices_per_gemm=4)
    assert [[chunk.owner for chunk in work.chunks] for work in gather.work] == [[5], [4], [6, 7], [0, 1, 2, 3]]
    assert [[chunk.owner for chunk in work.chunks] for work in scatter.work] == [[4], [6, 7], [0, 1, 2, 3], [5], []]
    assert [message.after_work for message in scatter.messages] == [1, 2, 2, 3, 3, 3, 3]
    for plan in (gather, scatter):
        assert [message.to for message in plan.messages] == [4, 7, 6, 1, 0, 3, 2]


@pytest.mark.parametrize("collective", BUILDERS)
@pytest.mark.parametrize("options", [{"pattern": "ring"}, {"pattern": "serial"}, {"chunks_per_rank": 2}])
def test_cut_or_forwarded_slices_share_no_gemm(collective: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="slices_per_gemm: 2: needs pattern direct and chunks_per_rank 1"):
        plans(collective, 4, slices_per_gemm=2, **options)


@pytest.mark.parametrize("collective", BUILDERS)
def test_serial_is_correct_but_not_tail_free(collective: str) -> None:
    proof = check(plans(collective, 4, chunks_per_rank=2, pattern="serial"))
    assert not proof.tail_free


def test_order_of_the_paper() -> None:
    gather = all_gather_plan(4, 1, pattern="ring")
    assert [work.chunks[0].owner for work in gather.work] == [1, 0, 3, 2]
    scatter = reduce_scatter_plan(4, 1, pattern="ring")
    assert [work.chunks[0].owner for work in scatter.work] == [0, 3, 2, 1]
    direct = reduce_scatter_plan(4, 1, pattern="direct")
    assert [work.chunks[0].owner for work in direct.work if work.chunks] == [2, 3, 0, 1]


def test_one_sub_slice_is_exposed() -> None:
    """The last GEMM of a gather and the first GEMM of a scatter compute one chunk, not one slice."""
    gather = all_gather_plan(4, 2, chunks_per_rank=4, split="edge")
    assert len(gather.work[-1].chunks) == 1
    assert [len(work.chunks) for work in gather.work[:3]] == [4, 4, 4]
    scatter = reduce_scatter_plan(4, 2, chunks_per_rank=4, split="edge")
    assert len(scatter.work[0].chunks) == 1
    assert scatter.messages[0].after_work == 1


@pytest.mark.parametrize("pattern", ["ring", "direct"])
@pytest.mark.parametrize("collective", BUILDERS)
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_every_damaged_plan_is_caught(collective: str, pattern: str, num_ranks: int) -> None:
    """The verifier rejects every single change to the plan of one rank: peer, chunk, dropped wait or add, order."""
    good = plans(collective, num_ranks, chunks_per_rank=2, pattern=pattern)
    check(good)
    for damaged in _damage(good[1]):
        with pytest.raises(ScheduleError):
            check([good[0], damaged, *good[2:]])


def _damage(plan: Plan) -> list[Plan]:
    messages, work = list(plan.messages), list(plan.work)
    damaged = []

    def change_message(index: int, **change: object) -> None:
        changed = [*messages]
        changed[index] = dataclasses.replace(messages[index], **change)  # type: ignore[arg-type]
        damaged.append(dataclasses.replace(plan, messages=tuple(changed)))

    for index, message in enumerate(messages):
        change_message(index, recv=Chunk(message.recv.owner, 1 - message.recv.part))
        change_message(index, send=Chunk(message.send.owner, 1 - message.send.part))
        change_message(index, to=plan.rank)
        if plan.collective == "reduce_scatter":
            change_message(index, after_work=message.after_work - 1)
        if message.after_messages:
            change_message(index, after_messages=())
            change_message(index, after_messages=(message.after_messages[0] + 1,))
        shorter = messages[:index] + messages[index + 1 :]
        damaged.append(dataclasses.replace(plan, messages=tuple(shorter)))
    for index, unit in enumerate(work):
        if unit.needs or unit.adds:
            unwaited = dataclasses.replace(unit, needs=(), adds=unit.adds[1:])
            damaged.append(dataclasses.replace(plan, work=(*work[:index], unwaited, *work[index + 1 :])))
        damaged.append(dataclasses.replace(plan, work=(*work[:index], *work[index + 1 :])))
        damaged.append(dataclasses.replace(plan, work=(*work[: index + 1], *work[index:])))
    return damaged


def test_deadlock_is_reported() -> None:
    good = plans("all_gather", 2)
    late = dataclasses.replace(good[0], messages=tuple(dataclasses.replace(e, after_work=2) for e in good[0].messages))
    stuck = dataclasses.replace(good[1], messages=tuple(dataclasses.replace(e, after_work=2) for e in good[1].messages))
    with pytest.raises(ScheduleError, match="deadlock at message 0 of 1, work 1 of 2"):
        check([late, stuck])


@settings(max_examples=200)
@given(st.integers(0, 500), st.integers(1, 64), st.integers(1, 9), st.sampled_from([None, "first", "last", "both"]))
def test_layout_covers_every_row_once(num_rows: int, num_ranks: int, chunks_per_rank: int, small: Small | None) -> None:
    layout = ChunkLayout(num_rows, num_ranks, chunks_per_rank, small)
    rows = []
    for owner in range(num_ranks):
        start, stop = layout.shard(owner)
        assert stop - start == layout.shard_rows(owner)
        inside = []
        for part in range(chunks_per_rank):
            chunk = Chunk(owner, part)
            first, last = layout.rows(chunk)
            assert layout.num_chunk_rows(chunk) == last - first
            assert layout.rows_in_shard(chunk) == (first - start, last - start)
            inside += range(first, last)
        assert inside == list(range(start, stop))
        rows += inside
    assert rows == list(range(num_rows))
    sizes = [layout.shard_rows(owner) for owner in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("small", "parts", "weights"),
    [
        (None, 3, (1, 1, 1)),
        ("last", 1, (1,)),
        ("last", 2, (1, 1)),
        ("last", 4, (4, 2, 1, 1)),
        ("first", 6, (1, 1, 2, 4, 4, 4)),
        ("both", 7, (1, 2, 4, 4, 4, 2, 1)),
    ],
)
def test_exposed_parts_are_small(small: Small | None, parts: int, weights: tuple[int, ...]) -> None:
    assert small is None or part_weights(parts, small) == weights
    layout = ChunkLayout(2 * sum(weights) * 5, 2, parts, small)
    assert [layout.num_chunk_rows(Chunk(1, part)) for part in range(parts)] == [5 * weight for weight in weights]


def test_a_gather_ends_and_a_scatter_starts_with_a_small_part() -> None:
    sizes = {}
    for plan in (all_gather_plan(2, 0, chunks_per_rank=4), reduce_scatter_plan(2, 0, chunks_per_rank=4)):
        layout = plan.layout(32)
        first, *_, last = (layout.num_chunk_rows(message.recv) for message in plan.messages)
        sizes[plan.collective] = (first, last)
    assert sizes == {"all_gather": (8, 2), "reduce_scatter": (2, 8)}


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("num_ranks", lambda: all_gather_plan(65, 0)),
        ("rank", lambda: reduce_scatter_plan(4, 4)),
        ("chunks_per_rank", lambda: reduce_scatter_plan(4, 0, chunks_per_rank=0)),
        ("pattern", lambda: all_gather_plan(4, 0, pattern="tree")),  # type: ignore[arg-type]
        ("split", lambda: all_gather_plan(4, 0, split="some")),  # type: ignore[arg-type]
    ],
)
def test_invalid_arguments_name_the_argument(field: str, call: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        call()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({}, [[0], [1], [2], [3], [4], [5], [6]]),
        ({"slices_per_gemm": 2}, [[0], [1, 2], [3, 4], [5, 6]]),
        ({"slices_per_gemm": 4}, [[0], [1, 2], [3, 4, 5, 6]]),
        ({"pattern": "serial"}, [[0, 1, 2, 3, 4, 5, 6]]),
        ({"pattern": "ring"}, [[0], [1], [2], [3], [4], [5], [6]]),
    ],
)
@pytest.mark.parametrize("collective", BUILDERS)
def test_messages_of_one_gemm_are_one_call(collective: str, options: dict[str, Any], calls: list[list[int]]) -> None:
    for plan in plans(collective, 8, split="edge", **options):
        numbers = [message.call for message in plan.messages]
        assert [[k for k, each in enumerate(numbers) if each == number] for number in sorted({*numbers})] == calls


def test_describe_lists_all_work_and_messages() -> None:
    text = describe(reduce_scatter_plan(2, 0, chunks_per_rank=2, pattern="ring"))
    assert text.splitlines() == [
        "reduce_scatter ring, rank 0 of 2, 2 chunk(s) per rank, 2 message(s)",
        "  compute 1.0",
        "  message 0: send 1.0 to 1, receive 0.0 from 1",
        "  compute 1.1",
        "  message 1: send 1.1 to 1, receive 0.1 from 1",
        "  compute 0.0 0.1, add message 0, 1",
    ]
