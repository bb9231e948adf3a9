"""Ulysses attention is equal to attention over the whole sequence: output and all gradients."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import UlyssesPlan
from tests.helpers.world import World
from tests.ops.ulysses import attention_workers as cases


@pytest.mark.parametrize("kind", ["contiguous", "zigzag", "lengths"])
@pytest.mark.parametrize(
    ("num_ranks", "heads", "kv_heads"),
    [(1, 4, 2), (2, 8, 8), (2, 8, 4), (3, 6, 1), (4, 8, 8), (4, 8, 2), (4, 16, 4), (4, 12, 6)],
)
def test_equals_textbook_attention(world: World, num_ranks: int, heads: int, kv_heads: int, kind: str) -> None:
    # 37 rows: not divisible by ranks, nor by twice as many.
    world.run(num_ranks, cases.against_reference, 37, heads, kv_heads, kind)


@pytest.mark.parametrize("pattern", ["direct", "serial"])
@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_number_of_groups(world: World, kv_heads: int, num_groups: int, pattern: str) -> None:
    plan = UlyssesPlan(num_groups, pattern)  # type: ignore[arg-type]
    world.run(2, cases.against_reference, 10, 8, kv_heads, "zigzag", plan=plan)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "num_ranks", "head_bytes", "groups"),
    [
        (32, 32, 2, 1 << 20, 8),  # as many as there may be
        (8, 8, 2, 1 << 20, 4),  # as many as there are heads
        (16, 16, 2, 3 << 16, 8),  # 24 heads a message of all groups: 4.5 MiB
        (16, 16, 2, 3 << 15, 4),  # 2.25 MiB
        (16, 16, 2, 64, 2),  # never one for small messages
        (4, 4, 4, 1 << 20, 1),  # one head a rank
        (16, 4, 2, 1 << 20, 2),  # key/value heads of their own
        (16, 2, 4, 1 << 20, 4),  # fewer of them than ranks
    ],
)
def test_groups_that_are_chosen(heads: int, kv_heads: int, num_ranks: int, head_bytes: int, groups: int) -> None:
    assert UlyssesPlan().heads(heads, kv_heads, num_ranks, head_bytes).num_groups == groups


def test_over_sockets_as_they_are(world: World) -> None:
    for kind in ("contiguous", "zigzag"):
        world.run(4, cases.against_reference, 61, 8, 4, kind, late=False)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("seed", range(3))
def test_random_calls(world: World, num_ranks: int, seed: int) -> None:
    world.run(num_ranks, cases.random_calls, seed * 4 + num_ranks, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "kv_heads", "num_groups"), [(8, 8, 2), (16, 1, 4), (8, 2, 2)])
def test_rounding_is_that_of_one_rank(
    world: World, dtype: torch.dtype, heads: int, kv_heads: int, num_groups: int
) -> None:
    world.run(4, cases.rounding, dtype, heads, kv_heads, num_groups)


def test_bytes_that_are_sent(world: World) -> None:
    """MHA: 3 there and 1 back, of which (N-1)/N leave; the reverse in backward."""
    local = 8 * 2 * 8 * cases.SIZE * 8
    sent = world.run(4, cases.against_reference, 32, 8, 8)
    assert sent == [[4 * local * 3 // 4] * 2] * 4


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("num_ranks", "heads", "kv_heads"), [(1, 4, 2), (2, 8, 4), (3, 6, 3), (4, 16, 8)])
def test_a_whole_layer_equals_its_parts(
    world: World, num_ranks: int, heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    for kind in ("contiguous", "zigzag", "lengths"):
        world.run(num_ranks, cases.layer, 37, heads, kv_heads, kind, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_layer_options(world: World, num_groups: int, dtype: torch.dtype) -> None:
    plan = UlyssesPlan(num_groups)
    world.run(2, cases.layer, 20, 8, 8, "zigzag", plan=plan, dtype=dtype, bias=False, main_grad=True, late=False)
    world.run(2, cases.layer, 20, 8, 8, "zigzag", plan=plan, dtype=dtype, rotary=False)
    serial = UlyssesPlan(num_groups, "serial")
    world.run(2, cases.layer, 20, 8, 8, "contiguous", plan=serial, dtype=dtype)


def test_activation_recomputation(world: World) -> None:
    assert world.run(2, cases.recomputed) == [[True] * 4] * 2


def test_what_does_not_fit_is_refused(world: World) -> None:
    messages = world.run(2, cases.refused)
    for texts in messages:
        assert [text.split(":")[0] for text in texts] == ["q", "q", "q", "num_heads", "layout", "layout"]
