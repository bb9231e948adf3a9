"""Balanced attention is equal to attention of each document alone, whatever the batch: output and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_overlap.ops.varlen.pass_kv_pass_q import Shape
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology, partition
from megatron_overlap.schedules.varlen.baselines import METHODS
from tests.helpers.world import World
from tests.ops.varlen import attention_workers as cases

# Links so slow that routes win for a few bytes, and latencies that do not count.
SLOW: dict[str, Any] = {"intra_gbps": 360.0, "inter_gbps": 1e-6, "intra_latency_us": 0.001, "inter_latency_us": 0.002}
# Linear layers so slow that rows always move to where they are even.
EAGER = CostModel(linear_fs=10**15)
MACHINES = {
    1: [Topology(1, 1)],
    2: [Topology(1, 2), Topology(2, 1)],
    3: [Topology(1, 3), Topology(3, 1)],
    4: [Topology(1, 4), Topology(2, 2, 2, **SLOW), Topology(4, 1)],
}
ADVERSARIAL = {
    "one_document": [61],
    "all_of_length_one": [1] * 13,
    "empty_documents": [0, 17, 0, 0, 5, 0],
    "nothing": [0, 0],
    "fewer_tokens_than_ranks": [2],
    "one_token": [1],
    "mixed": [45, 19, 8, 3, 1, 1, 0, 30, 2],
}


def fitting(lengths: list[int], topology: Topology, spare: int = 0, method: str = "balanced") -> Plan:
    """A plan of one pass, which `spare` 0 fills to the last token."""
    capacity = max(1, -(-sum(lengths) // topology.ranks)) + spare
    return METHODS[method](lengths, topology, capacity=capacity, cost=EAGER)


@pytest.mark.parametrize("batch", ADVERSARIAL)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_adversarial_batches(world: World, num_ranks: int, batch: str) -> None:
    for topology in MACHINES[num_ranks]:
        plan = fitting(ADVERSARIAL[batch], topology)
        for moves, layout in (("keys", "linear"), ("queries", "attention")):
            world.run(num_ranks, cases.against_reference, plan, 4, 2, moves=moves, layout=layout)


# Ranks hold very different numbers of tokens in attention: whole documents, rings, or both have to move.
UNEVEN: dict[str, Plan] = {
    "whole_documents": METHODS["packing"]([30, 4, 3, 1, 9, 1], Topology(2, 2), capacity=48, cost=EAGER),
    "one_of_many_ranks": METHODS["packing"]([40], Topology(1, 4), capacity=40, cost=EAGER),
    "rings": METHODS["hybrid"]([60, 9, 1, 4, 2], Topology(2, 2, 2, **SLOW), capacity=30, cost=EAGER),
    "queries": METHODS["hybrid"]([33, 20, 7, 3, 2, 0, 1], Topology(1, 4), capacity=12, cost=EAGER),
}


@pytest.mark.parametrize("batch", UNEVEN)
def test_rows_of_linear_layers(world: World, batch: str) -> None:
    plan = UNEVEN[batch]
    for late in (True, False):
        for window in (None, 5):
            world.run(4, cases.against_reference, plan, 4, 2, late=late, layout="linear", window=window)
    world.run(4, cases.between_linear_layers, plan)


def test_bytes_of_rows_that_move(world: World) -> None:
    """Three of four ranks get ten of forty rows each of one rank's document, and the way back: q, k, v and result."""
    sent = world.run(4, cases.against_reference, UNEVEN["one_of_many_ranks"], 4, 2, layout="linear")
    row = cases.SIZE * 8
    there, back = [0, 10 * 8 * row, 10 * 8 * row, 10 * 8 * row], [30 * 4 * row, 0, 0, 0]
    assert sent == [[("forward", a + b), ("dgrad", a // 2 + 2 * b)] for a, b in zip(there, back, strict=True)]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_batch(world: World, data: st.DataObject) -> None:
    num_ranks = data.draw(st.sampled_from([2, 3, 4, 4]))
    topology = data.draw(st.sampled_from(MACHINES[num_ranks]))
    lengths = data.draw(st.lists(st.integers(0, 60), max_size=9))
    method = data.draw(st.sampled_from(["balanced", "balanced", "ring", "all_gather"]))
    plan = fitting(lengths, topology, data.draw(st.integers(0, 9)), method)
    heads, kv_heads = data.draw(st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 1)]))
    options = {
        "moves": data.draw(st.sampled_from([None, "keys", "queries"])),
        "window": data.draw(st.sampled_from([None, None, 0, 3, 20])),
        "softmax_scale": data.draw(st.sampled_from([None, 0.7])),
        "late": data.draw(st.booleans()),
        "layout": data.draw(st.sampled_from(["attention", "linear"])),
    }
    world.run(num_ranks, cases.against_reference, plan, heads, kv_heads, **options)


HEADS = {"mha": (4, 4), "gqa": (4, 1)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
MIXED = [90, 40, 25, 7, 7, 3, 1]


@pytest.mark.parametrize("moves", ["keys", "queries"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_rounding_is_that_of_one_rank(world: World, num_ranks: int, dtype: str, heads: str, moves: str) -> None:
    if num_ranks == 1 and moves == "queries":
        pytest.skip("nothing travels")
    for topology in MACHINES[num_ranks][-2:]:
        world.run(num_ranks, cases.rounding, fitting(MIXED, topology), DTYPES[dtype], *HEADS[heads], moves)


@pytest.mark.parametrize("moves", ["keys", "queries"])
def test_same_bits_whatever_lands_first(world: World, moves: str) -> None:
    for topology in MACHINES[4]:
        assert world.run(4, cases.repeated, fitting([70, 40, 30, 12, 5], topology), moves) == [True] * 4


def test_several_passes(world: World) -> None:
    plan = partition([50, 30, 20, 10, 40, 9], Topology(1, 2), capacity=30, cost=EAGER)
    assert len(plan.passes) > 1
    world.run(2, cases.against_reference, plan, 4, 2)


def test_fewer_bytes_are_chosen() -> None:
    """Forward moves keys always; backward with as many key heads as query heads moves queries in bf16, not in fp32."""
    assert Shape(8, 8, 64, torch.bfloat16).cheaper(backward=False) == "keys"
    assert Shape(8, 8, 64, torch.bfloat16).cheaper(backward=True) == "queries"
    assert Shape(8, 8, 64, torch.float32).cheaper(backward=True) == "keys"
    assert Shape(8, 2, 64, torch.bfloat16).cheaper(backward=True) == "keys"


def test_bytes_that_are_sent(world: World) -> None:
    """Of four ranks' keys and values, early halves go to three others each and late halves to the ones before."""
    sent = world.run(4, cases.against_reference, fitting([64], Topology(1, 4)), 4, 2)
    row = 2 * 2 * cases.SIZE * 8
    forward = sum(num_bytes for rank in sent for what, num_bytes in rank if what == "forward")
    assert forward == row * (4 * 3 * 8 + (1 + 2 + 3) * 8)
    backward = sum(num_bytes for rank in sent for what, num_bytes in rank if what == "dgrad")
    assert backward == 2 * forward


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_remap_moves_rows_there_and_gradients_back(world: World, num_ranks: int) -> None:
    for topology in MACHINES[num_ranks]:
        for lengths in ADVERSARIAL.values():
            world.run(num_ranks, cases.remapped, fitting(lengths, topology, spare=5))
        if num_ranks & (num_ranks - 1) == 0:
            # One document a pass: ranks hold very different numbers of tokens.
            world.run(num_ranks, cases.remapped, METHODS["hybrid"]([9, 1, 4, 2], topology, capacity=9, cost=EAGER))


def test_what_does_not_fit_is_refused(world: World) -> None:
    for texts in world.run(2, cases.refused, fitting([30, 20], Topology(1, 2))):
        assert [text.split(":")[0] for text in texts] == [
            "dropout",
            "window",
            "index",
            "q",
            "k",
            "q",
            "q",
            "q",
            "layout",
            "x",
        ]


@pytest.mark.long
@pytest.mark.parametrize("moves", ["keys", "queries"])
def test_eight_ranks(moves: str) -> None:
    eight = World(8, sizes=(8,))
    try:
        for topology in (Topology(2, 4, 4, **SLOW), Topology(1, 8), Topology(4, 2, 1)):
            for lengths in ADVERSARIAL.values():
                eight.run(8, cases.against_reference, fitting(lengths, topology), 4, 2, moves=moves)
            eight.run(8, cases.against_reference, fitting([90, 33, 20, 9, 5, 2, 1, 1], topology), 4, 4, moves=moves)
            for dtype in DTYPES.values():
                for heads in HEADS.values():
                    eight.run(8, cases.rounding, fitting([150, *MIXED], topology), dtype, *heads, moves)
    finally:
        eight.close()
