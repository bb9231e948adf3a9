"""Attention over a paged cache, compared with attention over whole sequences in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_overlap.adapters.cpu import paged_attention as paged

BLOCK, HEADS, GROUPS, WIDTH = 4, 4, 2, 8


def cached(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Any]]:
    """Keys and values in shuffled blocks with NaN where nothing is stored, the block table, and both as sequences."""
    generator = torch.Generator().manual_seed(5)
    blocks = torch.randperm(sum(-(-n // BLOCK) for n in lengths), generator=generator).tolist()
    k, v = (torch.full((len(blocks), BLOCK, GROUPS, WIDTH), float("nan")) for _ in range(2))
    table = torch.zeros(len(lengths), max(-(-n // BLOCK) for n in lengths), dtype=torch.int32)
    whole = []
    for request, length in enumerate(lengths):
        pair = torch.randn(2, length, GROUPS, WIDTH, generator=generator)
        whole.append(pair)
        for number in range(-(-length // BLOCK)):
            table[request, number] = block = blocks.pop()
            rows = slice(number * BLOCK, min(length, (number + 1) * BLOCK))
            k[block, : rows.stop - rows.start], v[block, : rows.stop - rows.start] = pair[:, rows]
    return k, v, table, whole


def exact(q: torch.Tensor, pair: torch.Tensor, scale: float) -> torch.Tensor:
    k, v = pair.double().repeat_interleave(HEADS // GROUPS, dim=2)
    out = []
    for row, query in enumerate(q.double()):
        seen = k.shape[0] - q.shape[0] + row + 1
        scores = torch.stack([k[:seen, h] @ query[h] for h in range(HEADS)]) * scale
        out.append(torch.stack([scores.softmax(-1)[h] @ v[:seen, h] for h in range(HEADS)]))
    return torch.stack(out).float()


def test_prefill_and_a_continued_prefill() -> None:
    lengths, rows = [9, 4, 1, 6], [9, 2, 1, 0]
    k, v, table, whole = cached(lengths)
    q = torch.randn(sum(rows), HEADS, WIDTH, generator=torch.Generator().manual_seed(6))
    starts, keys = (torch.tensor([0, *each]).cumsum(0) for each in (rows, lengths))
    out = paged.flash_attn_varlen_func(q, k, v, starts, keys, 9, 9, softmax_scale=0.3, block_table=table)
    expected = torch.cat([exact(part, pair, 0.3) for part, pair in zip(q.split(rows), whole, strict=True) if len(part)])
    torch.testing.assert_close(out, expected)


def test_decode() -> None:
    lengths = [9, 4, 1]
    k, v, table, whole = cached(lengths)
    q = torch.randn(3, 1, HEADS, WIDTH, generator=torch.Generator().manual_seed(6))
    sizes = torch.tensor(lengths)
    out = paged.flash_attn_with_kvcache(q, k, v, sizes, 0.3, True, (-1, -1), table)
    torch.testing.assert_close(out, torch.stack([exact(q[i], whole[i], 0.3) for i in range(3)]))


def test_other_attention_is_refused() -> None:
    k, v, table, _ = cached([4])
    q, starts = torch.zeros(4, HEADS, WIDTH), torch.tensor([0, 4])
    for wrong in ({"causal": False}, {"window_size": (3, 0)}, {"block_table": None}, {"return_attn_probs": True}):
        settings: dict[str, Any] = {"softmax_scale": 1.0, "block_table": table, **wrong}
        with pytest.raises(NotImplementedError, match="causal"):
            paged.flash_attn_varlen_func(q, k, v, starts, starts, 4, 4, **settings)
    with pytest.raises(NotImplementedError, match="causal"):
        paged.flash_attn_with_kvcache(q[None], k, v, torch.tensor([4]), 1.0, True, (3, 0), table)
