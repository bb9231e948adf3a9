"""Ulysses attention equals attention over the whole sequence: output and all gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from megatron_overlap.ops import UlyssesPlan
from megatron_overlap.ops.flash_attention import sequence_backward, sequence_forward
from megatron_overlap.schedules.ulysses import AllToAllPattern
from tests.helpers.world import World
from tests.ops.ulysses import attention_workers as workers
from tests.ops.ulysses.attention_workers import HEAD_SIZE, AttentionCase, LayerCase, Sequence

SEQUENCES: list[Sequence] = ["contiguous", "zigzag", "lengths"]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# Not divisible by the number of ranks, nor by twice that number.
UNEVEN_ROWS = 37


@dataclass(frozen=True)
class Heads:
    """Numbers of ranks, query heads and key/value heads."""

    ranks: int
    heads: int
    kv_heads: int

    def __str__(self) -> str:
        return f"{self.ranks}ranks-{self.heads}heads-{self.kv_heads}kv"


@pytest.mark.parametrize("sequence", SEQUENCES)
@pytest.mark.parametrize(
    "shape",
    [
        Heads(ranks=1, heads=4, kv_heads=2),
        Heads(ranks=2, heads=8, kv_heads=8),
        Heads(ranks=2, heads=8, kv_heads=4),
        Heads(ranks=3, heads=6, kv_heads=1),
        Heads(ranks=4, heads=8, kv_heads=8),
        Heads(ranks=4, heads=8, kv_heads=2),
        Heads(ranks=4, heads=16, kv_heads=4),
        Heads(ranks=4, heads=12, kv_heads=6),
    ],
    ids=str,
)
def test_equals_textbook_attention(world: World, shape: Heads, sequence: Sequence) -> None:
    case = AttentionCase(UNEVEN_ROWS, shape.heads, shape.kv_heads, sequence)
    world.run(shape.ranks, workers.compare_with_reference, case)


@pytest.mark.parametrize("pattern", ["direct", "serial"])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_number_of_groups(world: World, kv_heads: int, num_groups: int, pattern: AllToAllPattern) -> None:
    plan = UlyssesPlan(num_groups, pattern)
    case = AttentionCase(rows=10, heads=8, kv_heads=kv_heads, sequence="zigzag", plan=plan)
    world.run(2, workers.compare_with_reference, case)


@dataclass(frozen=True)
class GroupsCase:
    """Arguments of `UlyssesPlan.heads`, and the expected number of head groups."""

    heads: int
    kv_heads: int
    ranks: int
    head_bytes: int
    num_groups: int


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(GroupsCase(32, 32, 2, head_bytes=1 << 20, num_groups=8), id="upper limit"),
        pytest.param(GroupsCase(8, 8, 2, head_bytes=1 << 20, num_groups=4), id="number of heads"),
        pytest.param(GroupsCase(16, 16, 2, head_bytes=3 << 16, num_groups=8), id="4.5 MiB for all groups"),
        pytest.param(GroupsCase(16, 16, 2, head_bytes=3 << 15, num_groups=4), id="2.25 MiB for all groups"),
        pytest.param(GroupsCase(16, 16, 2, head_bytes=64, num_groups=2), id="at least two"),
        pytest.param(GroupsCase(4, 4, 4, head_bytes=1 << 20, num_groups=1), id="one head per rank"),
        pytest.param(GroupsCase(16, 4, 2, head_bytes=1 << 20, num_groups=2), id="no shared key/value heads"),
        pytest.param(GroupsCase(16, 2, 4, head_bytes=1 << 20, num_groups=4), id="fewer key/value heads than ranks"),
    ],
)
def test_default_number_of_groups(case: GroupsCase) -> None:
    layout = UlyssesPlan().heads(case.heads, case.kv_heads, case.ranks, case.head_bytes)
    assert layout.num_groups == case.num_groups


def test_without_artificial_delays(world: World) -> None:
    sequences: list[Sequence] = ["contiguous", "zigzag"]
    for sequence in sequences:
        case = AttentionCase(rows=61, heads=8, kv_heads=4, sequence=sequence, late=False)
        world.run(4, workers.compare_with_reference, case)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.long), 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(world: World, num_ranks: int, seed: int) -> None:
    world.run(num_ranks, workers.compare_random_calls, seed * 4 + num_ranks, 8)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_groups"),
    [
        pytest.param(8, 8, 2, id="mha"),
        pytest.param(16, 1, 4, id="one key/value head"),
        pytest.param(8, 2, 2, id="gqa"),
    ],
)
def test_rounding_is_that_of_one_rank(
    world: World, dtype: torch.dtype, heads: int, kv_heads: int, num_groups: int
) -> None:
    case = AttentionCase(rows=70, heads=heads, kv_heads=kv_heads, sequence="zigzag", plan=UlyssesPlan(num_groups))
    world.run(4, workers.compare_rounding, case, dtype)


def test_bytes_sent(world: World) -> None:
    """Forward sends q, k, v and returns the result; a rank sends (N - 1) / N of its rows. Backward sends as much."""
    ranks, case = 4, AttentionCase(rows=32, heads=8, kv_heads=8)
    tensor_bytes = case.rows // ranks * workers.BATCH * case.heads * HEAD_SIZE * 8
    sent = world.run(ranks, workers.compare_with_reference, case)
    assert sent == [[4 * tensor_bytes * (ranks - 1) // ranks] * 2] * ranks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(
    "shape",
    [
        Heads(ranks=1, heads=4, kv_heads=2),
        Heads(ranks=2, heads=8, kv_heads=4),
        Heads(ranks=3, heads=6, kv_heads=3),
        Heads(ranks=4, heads=16, kv_heads=8),
    ],
    ids=str,
)
def test_a_whole_layer_equals_its_parts(world: World, shape: Heads, dtype: torch.dtype) -> None:
    for sequence in SEQUENCES:
        case = LayerCase(UNEVEN_ROWS, shape.heads, shape.kv_heads, sequence, dtype=dtype)
        world.run(shape.ranks, workers.compare_layer, case)


@DTYPES
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_layer_options(world: World, num_groups: int, dtype: torch.dtype) -> None:
    case = LayerCase(rows=20, heads=8, kv_heads=8, sequence="zigzag", plan=UlyssesPlan(num_groups), dtype=dtype)
    world.run(2, workers.compare_layer, replace(case, bias=False, main_grad=True, late=False))
    world.run(2, workers.compare_layer, replace(case, rotary=False))
    serial = UlyssesPlan(num_groups, "serial")
    world.run(2, workers.compare_layer, replace(case, sequence="contiguous", plan=serial))


def test_activation_recomputation(world: World) -> None:
    assert world.run(2, workers.compare_recomputation) == [[True] * 4] * 2


def test_attention_without_rows() -> None:
    """The kernel of the CPU would end the process."""
    query, key = torch.empty(0, 2, 4, HEAD_SIZE), torch.empty(0, 2, 2, HEAD_SIZE)
    out, saved = sequence_forward(query, key, key, causal=True, scale=1.0)
    gradients = sequence_backward(saved, out, causal=True, scale=1.0)
    assert [each.shape for each in (out, *gradients)] == [each.shape for each in (query, query, key, key)]


def test_invalid_arguments_name_the_argument(world: World) -> None:
    for texts in world.run(2, workers.error_messages):
        assert [text.split(":")[0] for text in texts] == ["q", "q", "q", "num_heads", "layout", "layout"]
