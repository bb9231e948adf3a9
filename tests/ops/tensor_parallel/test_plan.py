"""How many messages an op is cut into when nobody says."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops import LinearPlan
from megatron_overlap.ops.tensor_parallel.p2p import RowCollective

KIB = 1024


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "row_bytes", "gather", "scatter"),
    [
        (1, 4096, 4 * KIB, 4, 4),
        (2, 8192, 4 * KIB, 4, 4),
        (4, 4096, 4 * KIB, 3, 2),
        (8, 16384, 4 * KIB, 2, 1),
        (16, 32768, 4 * KIB, 1, 1),
        # Rows, and bytes, of which the smallest message would have too few.
        (4, 1536, 4 * KIB, 2, 2),
        (4, 512, 4 * KIB, 1, 1),
        (2, 8192, 64, 1, 1),
    ],
)
def test_messages_chosen(num_ranks: int, num_rows: int, row_bytes: int, gather: int, scatter: int) -> None:
    assert parts("all_gather", LinearPlan(), num_ranks, num_rows, row_bytes) == gather
    assert parts("reduce_scatter", LinearPlan(), num_ranks, num_rows, row_bytes) == scatter


def test_what_is_said_is_done() -> None:
    assert parts("all_gather", LinearPlan(chunks_per_rank=5), 4, 512, 64) == 5


def parts(collective: RowCollective, plan: LinearPlan, num_ranks: int, num_rows: int, row_bytes: int) -> int:
    """Messages a slice is cut into; a schedule needs nothing of the transport but who is there."""
    place = cast(Transport, SimpleNamespace(size=num_ranks, rank=0, copy_engines=False))
    return plan.schedule(collective, place, num_rows, row_bytes, torch.device("cpu"))[0].chunks_per_rank
