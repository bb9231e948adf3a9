"""Expert-parallel schedules are proved for all ranks and arbitrary routings."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.schedules.expert_parallel import FEW_ROWS, MAX_STEPS, ExpertPlan, Segment, expert_plan, max_parts
from tests.schedules.verify import ScheduleError
from tests.schedules.verify_expert_parallel import check_expert_plans

Routing = list[list[list[int]]]
"""`routing[source][owner][expert]`."""


def plans(routing: Routing, **options: object) -> list[ExpertPlan]:
    size = len(routing)
    return [
        expert_plan(rank, routing[rank], [routing[source][rank] for source in range(size)], **options)  # type: ignore[arg-type]
        for rank in range(size)
    ]


def random_routing(size: int, experts: int, seed: int, most: int = 40) -> Routing:
    """Many zeros and single tokens, and some groups that are large enough to be cut."""
    draw = random.Random(seed)
    values = [0, 0, 1, 2, 63, 64, most, 5 * most]
    return [[[draw.choice(values) for _ in range(experts)] for _ in range(size)] for _ in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 16, pytest.param(33, marks=pytest.mark.long), 64])
def test_proved_for_every_group_size(size: int) -> None:
    routing = random_routing(size, experts=2 if size < 33 else 1, seed=size, most=40 if size < 33 else 3)
    made = plans(routing)
    num_messages = check_expert_plans(made, routing)
    assert num_messages <= len(made[0].messages) == max_parts(size) * (size - 1)


@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
def test_calls_of_nccl_are_few_and_the_same_on_both_ranks(size: int) -> None:
    transfers = [plan.transfers for plan in plans([[[1]] * size] * size)]
    for rank, messages in enumerate(transfers):
        assert all(message.call == transfers[message.to][k].call for k, message in enumerate(messages)), rank
        count = len(messages) // 2
        dispatch, combine = ({message.call for message in some} for some in (messages[:count], messages[count:]))
        assert dispatch.isdisjoint(combine)
        assert len(dispatch) == len(combine) <= MAX_STEPS
        assert len(dispatch) == count or count > MAX_STEPS


COUNTS = st.one_of(st.integers(0, 3), st.integers(60, 70), st.integers(0, 700))


@settings(max_examples=60)
@given(st.data())
def test_proved_for_arbitrary_counts(data: st.DataObject) -> None:
    size, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    pair = st.lists(COUNTS, min_size=experts, max_size=experts)
    routing = [[data.draw(pair) for _ in range(size)] for _ in range(size)]
    options = {
        "parts": data.draw(st.sampled_from([None, 1, 2, 5])),
        "min_rows": data.draw(st.sampled_from([64, 100, 128])),
        "compute_per_message": data.draw(st.sampled_from([0.0, 0.1, 1.0, 20.0])),
        "filler_rows": data.draw(st.sampled_from([0.0, 90.5, 1e4])),
    }
    check_expert_plans(plans(routing, **options), routing)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("kind", ["none", "one token", "all to rank 0", "own rows only"])
def test_extreme_routings(size: int, kind: str) -> None:
    routing: Routing = [[[0, 0] for _ in range(size)] for _ in range(size)]
    if kind == "one token":
        routing[size - 1][0][1] = 1
    for source in range(size):
        if kind == "all to rank 0":
            routing[source][0] = [300, 41]
        if kind == "own rows only":
            routing[source][source] = [300, 41]
    check_expert_plans(plans(routing), routing)


def test_chunks_are_balanced_and_keep_small_groups_whole() -> None:
    plan = expert_plan(0, [[0, 0], [1000, 40]], [[0, 0], [0, 0]], parts=4)
    assert [message.sent for message in plan.messages] == [
        (Segment(0, 0, 260),),
        (Segment(0, 260, 520),),
        (Segment(0, 520, 780),),
        (Segment(0, 780, 1000), Segment(1, 1000, 1040)),
    ]
    # A bound 50 rows before the end of a group moves to its end.
    plan = expert_plan(0, [[0, 0], [210, 110]], [[0, 0], [0, 0]], parts=2)
    assert [message.sent for message in plan.messages] == [(Segment(0, 0, 210),), (Segment(1, 210, 320),)]
    # So does one 80 rows before it, unless smaller pieces are permitted.
    for min_rows, stop in ((128, 240), (80, 160)):
        plan = expert_plan(0, [[0, 0], [240, 80]], [[0, 0], [0, 0]], parts=2, min_rows=min_rows)
        assert plan.messages[0].sent == (Segment(0, 0, stop),)
    # Fewer than 128 rows are one chunk, also of several experts.
    plan = expert_plan(0, [[0] * 4, [30] * 4], [[0] * 4] * 2, parts=2)
    assert [len(message.sent) for message in plan.messages] == [4, 0]
    # Half of a chunk of 400 rows, or more, is cut off.
    for rows, stop in ((599, 599), (600, 400)):
        plan = expert_plan(0, [[0, 0], [rows, 800 - rows]], [[0, 0], [0, 0]], parts=2)
        assert plan.messages[0].sent == (Segment(0, 0, stop),)


@pytest.mark.parametrize(("experts", "rows", "groups"), [(2, FEW_ROWS - 1, 1), (2, FEW_ROWS, 2), (1, 4096, 1)])
def test_a_step_gathers_few_rows(experts: int, rows: int, groups: int) -> None:
    """Rows of one expert follow one another, and need no copies."""
    plan = plans([[[rows] * experts] * 8] * 8)[1]
    assert [len(step.received) for step in plan.steps] == [groups] * 3 + [1]


def test_own_rows_fill_both_ends() -> None:
    routing = [[[1024], [1024]], [[1024], [1024]]]
    before = {
        ratio: [step.own_before for step in plans(routing, compute_per_message=ratio)[0].steps]
        for ratio in (0.0, 0.5, 1.0, 4.0)
    }
    # Chunks of 256 rows. One own piece hides the first message if computation is as slow as the link.
    assert before[4.0] == before[1.0] == [1] * 4
    # Twice as fast: two pieces hide the first message, and one more hides each following message.
    assert before[0.5] == [2, 3, 4, 4]
    assert before[0.0] == [4] * 4


@pytest.mark.parametrize(("ratio", "filler", "expected"), [(1.0, 256, [0] * 4), (0.5, 512, list(range(4)))])
def test_a_filler_takes_the_place_of_own_rows(ratio: float, filler: float, expected: list[int]) -> None:
    routing = [[[1024], [1024]], [[1024], [1024]]]
    plan = plans(routing, compute_per_message=ratio, filler_rows=filler)[0]
    assert [step.own_before for step in plan.steps] == expected


@pytest.mark.parametrize("size", [2, 3])
def test_every_damaged_plan_is_caught(size: int) -> None:
    routing = [[[130, 70] for _ in range(size)] for _ in range(size)]
    good = plans(routing, parts=2, min_rows=64)
    check_expert_plans(good, routing)
    damaged = _damage(good[1])
    assert len(damaged) > 15
    for plan in damaged:
        with pytest.raises(ScheduleError):
            check_expert_plans([good[0], plan, *good[2:]], routing)


def _damage(plan: ExpertPlan) -> list[ExpertPlan]:
    damaged = []
    for index, message in enumerate(plan.messages):
        first_sent, first_received = message.sent[0], message.received[0]
        changes: list[dict[str, object]] = [
            {"sent": message.sent[1:]},
            {"received": message.received[1:]},
            {"sent": (first_sent._replace(stop=first_sent.stop - 1), *message.sent[1:])},
            {"sent": (Segment(first_sent.expert, first_sent.start + 1, first_sent.stop + 1), *message.sent[1:])},
            {"received": (first_received._replace(expert=1 - first_received.expert), *message.received[1:])},
            {"to": plan.rank},
        ]
        for change in changes:
            changed = dataclasses.replace(message, **change)  # type: ignore[arg-type]
            messages = (*plan.messages[:index], changed, *plan.messages[index + 1 :])
            damaged.append(dataclasses.replace(plan, messages=messages))
        damaged.append(dataclasses.replace(plan, messages=(*plan.messages[:index], *plan.messages[index + 1 :])))
    damaged.append(dataclasses.replace(plan, received=plan.received[::-1]))
    for index, step in enumerate(plan.steps):
        (first, *others), *groups = step.received
        changed_steps = [
            step._replace(messages=step.messages[1:]),
            step._replace(received=(tuple(others), *groups)),
            step._replace(received=((first - 1, *others), *groups)),
        ]
        if others:
            changed_steps.append(step._replace(received=((*others, first), *groups)))
        for changed_step in changed_steps:
            steps = (*plan.steps[:index], changed_step, *plan.steps[index + 1 :])
            damaged.append(dataclasses.replace(plan, steps=steps))
    damaged.append(dataclasses.replace(plan, own=plan.own[1:]))
    damaged.append(dataclasses.replace(plan, own=(*plan.own, plan.own[0])))
    damaged.append(dataclasses.replace(plan, num_tokens=plan.num_tokens - 1))
    damaged.append(dataclasses.replace(plan, experts=plan.experts[::-1]))
    return damaged


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("rank", lambda: expert_plan(2, [[1], [1]], [[1], [1]])),
        ("parts", lambda: expert_plan(0, [[1], [1]], [[1], [1]], parts=0)),
        ("min_rows", lambda: expert_plan(0, [[1], [1]], [[1], [1]], min_rows=63)),
        ("sent, received", lambda: expert_plan(0, [[1], [1]], [[1]])),
        ("sent, received", lambda: expert_plan(0, [[1], [1, 2]], [[1], [1]])),
        ("sent, received", lambda: expert_plan(0, [[1], [-1]], [[1], [1]])),
        ("received", lambda: expert_plan(0, [[1], [1]], [[2], [1]])),
    ],
)
def test_wrong_arguments(text: str, call: object) -> None:
    with pytest.raises(ValueError, match=f"^{text}:"):
        call()  # type: ignore[operator]
