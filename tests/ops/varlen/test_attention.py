"""Balanced attention equals attention of each document alone for every batch: output and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_overlap.ops.varlen.pass_kv_pass_q import Shape
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology
from megatron_overlap.schedules.varlen.ring_groups import Passing
from scripts.bench.placements import METHODS
from tests.helpers.world import World
from tests.ops.varlen import attention_workers as workers
from tests.ops.varlen.attention_workers import GQA, HEAD_SIZE, Case, Heads

# Slow links without latency: routing is faster even for a few bytes.
SLOW: dict[str, Any] = {"intra_gbps": 360.0, "inter_gbps": 1e-6, "intra_latency_us": 0.001, "inter_latency_us": 0.002}
# Slow linear layers: rebalancing always pays off.
SLOW_LINEAR = CostModel(linear_fs=10**15)
TOPOLOGIES = {
    1: [Topology(1, 1)],
    2: [Topology(1, 2), Topology(2, 1)],
    3: [Topology(1, 3), Topology(3, 1)],
    4: [Topology(1, 4), Topology(2, 2, 2, **SLOW), Topology(4, 1)],
}
ADVERSARIAL = {
    "one_document": [61],
    "all_of_length_one": [1] * 13,
    "empty_documents": [0, 17, 0, 0, 5, 0],
    "only_empty_documents": [0, 0],
    "fewer_tokens_than_ranks": [2],
    "one_token": [1],
    "rings_that_share_ranks": [3, 30],
    "mixed": [45, 19, 8, 3, 1, 1, 0, 30, 2],
}


def one_pass(lengths: list[int], topology: Topology, spare: int = 0, method: str = "balanced") -> Plan:
    """A plan of one pass; the ranks are full if `spare` is 0."""
    capacity = max(1, -(-sum(lengths) // topology.ranks)) + spare
    return METHODS[method](lengths, topology, capacity=capacity, cost=SLOW_LINEAR)


@pytest.mark.parametrize("batch", ADVERSARIAL)
@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.long), 4])
def test_adversarial_batches(world: World, num_ranks: int, batch: str) -> None:
    for topology in TOPOLOGIES[num_ranks]:
        plan = one_pass(ADVERSARIAL[batch], topology)
        world.run(num_ranks, workers.compare_with_reference, Case(plan, passing="kv", layout="linear"))
        world.run(num_ranks, workers.compare_with_reference, Case(plan, passing="q", layout="attention"))


# Ranks hold very different numbers of tokens in the attention layout: whole documents, rings, or both must move.
UNEVEN: dict[str, Plan] = {
    "whole_documents": METHODS["packing"]([30, 4, 3, 1, 9, 1], Topology(2, 2), capacity=48, cost=SLOW_LINEAR),
    "one_of_many_ranks": METHODS["packing"]([40], Topology(1, 4), capacity=40, cost=SLOW_LINEAR),
    "rings": METHODS["hybrid"]([60, 9, 1, 4, 2], Topology(2, 2, 2, **SLOW), capacity=30, cost=SLOW_LINEAR),
    "pass_q": METHODS["hybrid"]([33, 20, 7, 3, 2, 0, 1], Topology(1, 4), capacity=12, cost=SLOW_LINEAR),
}


@pytest.mark.parametrize("batch", UNEVEN)
def test_linear_layout(world: World, batch: str) -> None:
    plan = UNEVEN[batch]
    for late in (True, False):
        world.run(4, workers.compare_with_reference, Case(plan, late=late, layout="linear"))
    world.run(4, workers.compare_with_separate_rebalancing, plan)


def test_bytes_of_rebalanced_rows(world: World) -> None:
    """One rank holds a document of 40 rows; in the linear layout every rank holds 10. q, k, v move, then the result."""
    sent = world.run(4, workers.compare_with_reference, Case(UNEVEN["one_of_many_ranks"], layout="linear"))
    head_bytes = HEAD_SIZE * 8
    qkv_heads = GQA.heads + 2 * GQA.kv_heads
    qkv, result = 10 * qkv_heads * head_bytes, 30 * GQA.heads * head_bytes
    inbound, outbound = [0, qkv, qkv, qkv], [result, 0, 0, 0]
    # Backward moves the output gradient in, which has half of the heads of q, k, v, and three gradients out.
    assert sent == [[("forward", a + b), ("dgrad", a // 2 + 2 * b)] for a, b in zip(inbound, outbound, strict=True)]


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(world: World, data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 3, 4, 4]))
    topology = data.draw(st.sampled_from(TOPOLOGIES[num_ranks]))
    lengths = data.draw(st.lists(st.integers(0, 60), max_size=9))
    method = data.draw(st.sampled_from(["balanced", "balanced", "ring", "all_gather"]))
    case = Case(
        plan=one_pass(lengths, topology, data.draw(st.integers(0, 9)), method),
        heads=data.draw(st.sampled_from([Heads(1, 1), Heads(4, 4), Heads(4, 2), Heads(6, 1)])),
        passing=data.draw(st.sampled_from([None, "kv", "q"])),
        softmax_scale=data.draw(st.sampled_from([None, 0.7])),
        late=data.draw(st.booleans()),
        layout=data.draw(st.sampled_from(["attention", "linear"])),
    )
    world.run(num_ranks, workers.compare_with_reference, case)


HEADS = {"mha": Heads(4, 4), "gqa": Heads(4, 1)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIXED = [90, 40, 25, 7, 7, 3, 1]


@pytest.mark.parametrize("passing", ["kv", "q"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, *(pytest.param(size, marks=pytest.mark.long) for size in (2, 3)), 4])
def test_rounding_is_that_of_one_rank(world: World, num_ranks: int, dtype: str, heads: str, passing: Passing) -> None:
    if num_ranks == 1 and passing == "q":
        pytest.skip("one rank sends no messages")
    for topology in TOPOLOGIES[num_ranks][-2:]:
        case = Case(one_pass(MIXED, topology), HEADS[heads], passing)
        world.run(num_ranks, workers.compare_rounding, case, DTYPES[dtype])


@pytest.mark.parametrize("passing", ["kv", "q"])
def test_results_do_not_depend_on_the_arrival_order(world: World, passing: Passing) -> None:
    for topology in TOPOLOGIES[4]:
        case = Case(one_pass([70, 40, 30, 12, 5], topology), passing=passing)
        assert world.run(4, workers.is_deterministic, case) == [True] * 4


def test_layers_share_their_transfers(world: World) -> None:
    """Results in the linear layout need new ones: each layer returns them in another tensor."""
    plan = UNEVEN["pass_q"]
    assert world.run(4, workers.repeated_layers, Case(plan)) == [(0, 0)] * 4
    found = world.run(4, workers.repeated_layers, Case(UNEVEN["whole_documents"], layout="linear"))
    assert found == [(2, 0)] * 4


def test_several_passes(world: World) -> None:
    plan = METHODS["hybrid"]([50, 30, 20, 10, 40, 9], Topology(1, 2), capacity=30, cost=SLOW_LINEAR)
    assert len(plan.passes) > 1
    world.run(2, workers.compare_with_reference, Case(plan))


def test_the_cheaper_of_pass_kv_and_pass_q_is_selected() -> None:
    """Backward with as many key heads as query heads uses pass-Q in bf16, not in fp32."""
    mha_bf16 = Shape(heads=8, kv_heads=8, size=64, dtype=torch.bfloat16)
    mha_fp32 = Shape(heads=8, kv_heads=8, size=64, dtype=torch.float32)
    gqa_bf16 = Shape(heads=8, kv_heads=2, size=64, dtype=torch.bfloat16)
    assert mha_bf16.backward_passing() == "q"
    assert mha_fp32.backward_passing() == "kv"
    assert gqa_bf16.backward_passing() == "kv"


def test_bytes_of_pass_kv(world: World) -> None:
    """Four ranks: each early chunk goes to the three other ranks, each late chunk only to earlier positions."""
    sent = world.run(4, workers.compare_with_reference, Case(one_pass([64], Topology(1, 4))))
    chunk_rows, row_bytes = 8, 2 * GQA.kv_heads * HEAD_SIZE * 8
    forward = sum(num_bytes for rank in sent for direction, num_bytes in rank if direction == "forward")
    assert forward == row_bytes * chunk_rows * (4 * 3 + (1 + 2 + 3))
    backward = sum(num_bytes for rank in sent for direction, num_bytes in rank if direction == "dgrad")
    assert backward == 2 * forward


def test_invalid_arguments_name_the_argument(world: World) -> None:
    for texts in world.run(2, workers.error_messages, one_pass([30, 20], Topology(1, 2))):
        assert [text.split(":")[0] for text in texts] == [
            "index",
            "q",
            "k",
            "q",
            "q",
            "q",
            "layout",
        ]


@pytest.mark.long
@pytest.mark.parametrize("passing", ["kv", "q"])
def test_eight_ranks(passing: Passing) -> None:
    eight = World(8, sizes=(8,))
    try:
        for topology in (Topology(2, 4, 4, **SLOW), Topology(1, 8), Topology(4, 2, 1)):
            for lengths in ADVERSARIAL.values():
                eight.run(8, workers.compare_with_reference, Case(one_pass(lengths, topology), passing=passing))
            plan = one_pass([90, 33, 20, 9, 5, 2, 1, 1], topology)
            eight.run(8, workers.compare_with_reference, Case(plan, Heads(4, 4), passing))
            for dtype in DTYPES.values():
                for heads in HEADS.values():
                    case = Case(one_pass([150, *MIXED], topology), heads, passing)
                    eight.run(8, workers.compare_rounding, case, dtype)
    finally:
        eight.close()
