"""How many messages an op is cut into when nobody says."""

from types import SimpleNamespace

import pytest
import torch

from megatron_overlap.ops import LinearPlan

KIB = 1024


@pytest.mark.parametrize(
    ("num_ranks", "num_rows", "row_bytes", "chunks"),
    [
        (1, 4096, 4 * KIB, 8),
        (2, 8192, 4 * KIB, 8),
        # A ring passes a message on while the next one comes in: with two to a slice its link waits for late wake-ups.
        (4, 4096, 4 * KIB, 3),
        (8, 16384, 4 * KIB, 2),
        (16, 32768, 4 * KIB, 1),
        # Rows, and bytes, of which the smallest message would have too few.
        (4, 1536, 4 * KIB, 2),
        (4, 512, 4 * KIB, 1),
        (2, 8192, 64, 1),
    ],
)
def test_messages_chosen(num_ranks: int, num_rows: int, row_bytes: int, chunks: int) -> None:
    place = SimpleNamespace(size=num_ranks, rank=0)
    plan = LinearPlan().schedule("all_gather", place, num_rows, row_bytes, torch.device("cpu"))  # type: ignore[arg-type]
    assert plan.chunks_per_rank == chunks
    assert (
        LinearPlan(chunks_per_rank=5)
        .schedule(
            "reduce_scatter",
            place,
            num_rows,
            row_bytes,
            torch.device("cpu"),  # type: ignore[arg-type]
        )
        .chunks_per_rank
        == 5
    )
