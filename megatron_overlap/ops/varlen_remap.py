"""Rows between the layout of attention and that of linear layers, where every rank has as many tokens as the others.

Source: Zeppelin (arXiv 2509.21841, section 4.3).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops import reference
from megatron_overlap.ops.common import Observer
from megatron_overlap.varlen import Plan
from megatron_overlap.varlen import remap as planner

Layout = Literal["linear", "attention"]


def remap(
    x: torch.Tensor,
    plan: Plan,
    *,
    index: int = 0,
    to: Layout,
    group: dist.ProcessGroup | Transport,
    observer: Observer | None = None,
) -> torch.Tensor:
    """Moves rows between the attention layout of a pass and the token-balanced layout of linear layers.

    Equal to gathering all rows and picking those of `varlen.remap.remap(plan.tokens(index), plan.topology)`, or of its
    way back; see `ops.reference.move_rows`. Only surpluses move, inside nodes first. The gradient takes the way back.

    Args:
        x: `[rows, ...]`; to linear, `plan.tokens(index)[rank]` rows in the order of `plan.pieces`; to attention, the
            rows that the linear layout gives this rank: `varlen.remap.remap(...).after[rank]`.
        plan: of the batch; the same on every rank.
        index: which pass of the plan.
        to: the layout to reach.
        group: the ranks of the plan in order, or their transport. All call, with the same trailing shape.
        observer: told `forward` and `dgrad` with the bytes that this rank sent.

    Returns:
        `[rows of the other layout, ...]`; bytes are moved, nothing is summed.

    Raises:
        ValueError: rows do not fit the plan.
        TransportError: a peer is gone or late beyond the deadline.
    """
    assert isinstance(group, dist.ProcessGroup)
    moves = planner.remap(plan.tokens(index), plan.topology)
    return reference.move_rows(x, moves if to == "linear" else moves.back(), group=group)
