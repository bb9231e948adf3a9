"""Balanced attention: documents of very different lengths, as `varlen.partition` lays them on the ranks.

Source: Zeppelin (arXiv 2509.21841, section 4.2), whose code is not public.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops import reference
from megatron_overlap.ops.common import Observer
from megatron_overlap.varlen import Plan

Side = Literal["keys", "queries"]
"""What travels round a ring: keys and values to the queries, or queries to the keys and values."""


def balanced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: Plan,
    *,
    index: int = 0,
    group: dist.ProcessGroup | Transport,
    softmax_scale: float | None = None,
    window: int | None = None,
    dropout: float = 0.0,
    moves: Side | None = None,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Equals causal attention of each document of a pass alone; see `ops.reference.balanced_attention`.

    Args:
        q: `[T, Hq, D]`, the T = `plan.tokens(index)[rank]` rows of this rank in the order of
            `plan.pieces(index, rank)`: for each ring the early chunk and then the late one, then whole documents.
            Positions are already encoded. T may be 0; every rank of the group must call.
        k: `[T, Hkv, D]`, the same rows; every Hq / Hkv query heads in a row share a key head.
        v: `[T, Hkv, D]`, the same rows.
        plan: of the batch; the same on every rank.
        index: which pass of the plan.
        group: the ranks of the plan in order, or their transport.
        softmax_scale: of the scores; None is `1 / sqrt(D)`.
        window: keys that a query sees before its own; None is all of its document.
        dropout: must be 0.
        moves: what travels in a ring; None chooses what is fewer bytes, in forward and in backward.
        observer: told `forward` and `dgrad` with the bytes that this rank sent.

    Returns:
        `[T, Hq, D]`, dtype of `q`, in the order of `q`.

    Raises:
        ValueError: shapes or dtypes do not fit each other or the plan, or dropout is on.
        TransportError: a peer is gone or late beyond the deadline.
    """
    assert isinstance(group, dist.ProcessGroup)
    options = {"softmax_scale": softmax_scale, "window": window}
    return reference.balanced_attention(q, k, v, plan, index=index, group=group, **options)  # type: ignore[arg-type]
