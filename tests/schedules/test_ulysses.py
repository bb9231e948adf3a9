"""Ulysses schedules are proved for all ranks; layouts cover every head and row once."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.ulysses import MAX_CALLS, AllToAllPlan, HeadLayout, SequenceLayout, ulysses_plan
from tests.schedules.verify import ScheduleError
from tests.schedules.verify_ulysses import check_all_to_all


def plans(num_ranks: int, **options: object) -> list[AllToAllPlan]:
    return [ulysses_plan(num_ranks, rank, **options) for rank in range(num_ranks)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_groups", "num_runs", "step"),
    [pytest.param(2, 1, 1, marks=pytest.mark.long), (2, 1, 7), (1, 2, 9), (3, 2, 21)],
)
def test_proved_for_every_group_size(num_groups: int, num_runs: int, step: int) -> None:
    for num_ranks in range(1, 65, step):
        proof = check_all_to_all(plans(num_ranks, num_groups=num_groups, num_runs=num_runs))
        assert proof.num_messages == 2 * (num_ranks - 1) * num_groups * num_runs
        assert proof.exposed_in == proof.exposed_out == (num_ranks > 1)


def test_serial_is_correct_and_exposes_all_messages() -> None:
    proof = check_all_to_all(plans(4, num_groups=3, pattern="serial"))
    assert proof.exposed_in == proof.exposed_out == 3


def test_message_order_of_one_rank() -> None:
    plan = ulysses_plan(4, 1, num_groups=2)
    assert [(m.send.direction, m.send.group, m.to) for m in plan.messages] == [
        (direction, group, to) for direction in ("in", "out") for group in (0, 1) for to in (2, 3, 0)
    ]
    # The first message leaves after the first piece of work; the second group is one piece.
    assert [m.after_work for m in plan.messages[:6]] == [1, 2, 3, 5, 5, 5]


@pytest.mark.parametrize("num_ranks", [2, 17, 18, 64])
def test_calls_of_nccl_are_few_and_the_same_on_both_ranks(num_ranks: int) -> None:
    """A rank produces the first group for one peer after the other; every later step has all messages at once."""
    made = plans(num_ranks, num_groups=2, num_runs=2)
    for plan in made:
        assert all(message.call == made[message.to].messages[k].call for k, message in enumerate(plan.messages))
        first, *later = (
            {message.call for message in plan.messages if (message.send.direction, message.send.group) == step}
            for step in (("in", 0), ("in", 1), ("out", 0), ("out", 1))
        )
        assert len(first) <= MAX_CALLS
        assert len(first) == num_ranks - 1 or num_ranks > MAX_CALLS + 1
        assert [*map(len, later)] == [1, 1, 1]
        assert len(first.union(*later)) == len(first) + 3


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("num_runs", [1, 2])
def test_every_damaged_plan_is_caught(num_ranks: int, num_runs: int) -> None:
    good = plans(num_ranks, num_groups=2, num_runs=num_runs)
    check_all_to_all(good)
    damaged = _damage(good[1])
    assert len(damaged) > 20
    for plan in damaged:
        with pytest.raises(ScheduleError):
            check_all_to_all([good[0], plan, *good[2:]])


def _damage(plan: AllToAllPlan) -> list[AllToAllPlan]:
    messages, work = list(plan.messages), list(plan.work)
    damaged = []
    for index, message in enumerate(messages):
        changes: list[dict[str, object]] = [
            {"send": message.send._replace(group=1 - message.send.group)},
            {"recv": message.recv._replace(group=1 - message.recv.group)},
            {"recv": message.recv._replace(rows=plan.num_ranks)},
            {"to": plan.rank},
            {"after_work": 0},
        ]
        if index < len(messages) - 1:
            # The last message would still be correct, only late.
            changes.append({"after_work": len(work)})
        if message.send.direction == "out":
            changes.append({"after_work": message.after_work - 1})
        for change in changes:
            changed = dataclasses.replace(message, **change)  # type: ignore[arg-type]
            damaged.append(dataclasses.replace(plan, messages=(*messages[:index], changed, *messages[index + 1 :])))
        damaged.append(dataclasses.replace(plan, messages=(*messages[:index], *messages[index + 1 :])))
    for index, task in enumerate(work):
        if task.needs:
            unwaited = dataclasses.replace(task, needs=task.needs[1:])
            damaged.append(dataclasses.replace(plan, work=(*work[:index], unwaited, *work[index + 1 :])))
        damaged.append(dataclasses.replace(plan, work=(*work[:index], *work[index + 1 :])))
        damaged.append(dataclasses.replace(plan, work=(*work[: index + 1], *work[index:])))
    return damaged


@settings(max_examples=200)
@given(st.integers(0, 300), st.integers(1, 64), st.booleans())
def test_every_row_is_held_once(num_rows: int, num_ranks: int, zigzag: bool) -> None:
    layout = (SequenceLayout.zigzag if zigzag else SequenceLayout.contiguous)(num_rows, num_ranks)
    held = [row for rank in range(num_ranks) for run in layout.runs[rank] for row in range(*run)]
    assert sorted(held) == list(range(num_rows))
    assert layout.num_rows == num_rows
    sizes = [layout.rows_of(rank) for rank in range(num_ranks)]
    assert max(sizes) - min(sizes) <= 1 + zigzag
    for rank in range(num_ranks):
        inside = [row for run in layout.local_runs(rank) for row in range(*run)]
        assert inside == list(range(sizes[rank]))


def test_zigzag_equals_megatrons() -> None:
    assert SequenceLayout.zigzag(16, 2).runs == (((0, 4), (12, 16)), ((4, 8), (8, 12)))


@settings(max_examples=300)
@given(st.data())
def test_every_head_attends_once_to_its_keys(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 12))
    per_rank = data.draw(st.integers(1, 8))
    heads = num_ranks * per_rank
    kv_heads = data.draw(st.sampled_from([k for k in range(1, heads + 1) if heads % k == 0]))
    groups = data.draw(st.integers(1, per_rank))
    layout = HeadLayout(heads, kv_heads, num_ranks, groups)
    attended: list[int] = []
    for rank in range(num_ranks):
        here: set[int] = set()
        ended: list[int] = []
        needed = {head for group in range(groups) for head in range(*layout.keys(rank, group))}
        for group in range(groups):
            new = set(range(*layout.first_keys(rank, group)))
            assert not new & here, "sent twice"
            here |= new
            inside: list[int] = []
            for call in layout.calls(rank, group):
                queries, keys = range(*call.queries), range(*call.keys)
                each = len(queries) // len(keys)
                assert each * len(keys) == len(queries)
                for index, head in enumerate(queries):
                    assert keys[index // each] == head // layout.queries_per_key
                assert set(keys) <= set(range(*layout.first_keys(rank, call.source_group)))
                assert call.source_group <= group
                assert not set(keys) & set(ended), "used after its gradient was sent"
                inside += queries
            assert inside == list(range(*layout.queries(rank, group)))
            attended += inside
            ended += range(*layout.last_keys(rank, group))
        assert here == needed
        assert sorted(ended) == sorted(needed)
    assert sorted(attended) == list(range(heads))


def test_groups_are_runs_of_heads_where_they_can_be() -> None:
    layout = HeadLayout(16, 8, 2, 2)
    assert layout.aligned
    assert [[layout.queries(rank, group) for rank in (0, 1)] for group in (0, 1)] == [
        [(0, 4), (4, 8)],
        [(8, 12), (12, 16)],
    ]
    assert not HeadLayout(16, 2, 4).aligned
    assert HeadLayout(16, 2, 4).shares_keys


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("num_ranks", lambda: ulysses_plan(65, 0)),
        ("rank", lambda: ulysses_plan(4, 4)),
        ("pattern", lambda: ulysses_plan(4, 0, pattern="ring")),  # type: ignore[arg-type]
        ("num_heads", lambda: HeadLayout(6, 6, 4)),
        ("num_kv_heads", lambda: HeadLayout(8, 3, 4)),
        ("num_groups", lambda: HeadLayout(8, 8, 4, 3)),
        ("runs", lambda: SequenceLayout((((0, 2),), ((3, 4),)))),
        ("runs", lambda: SequenceLayout((((0, 2),), ()))),
    ],
)
def test_invalid_arguments_name_the_argument(field: str, call: object) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        call()  # type: ignore[operator]
