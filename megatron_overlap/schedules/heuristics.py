"""In what order messages go, and how many a slice is cut into, where nobody says so. Measured on CPU hosts."""

from __future__ import annotations

from megatron_overlap.schedules.layout import Small, part_weights
from megatron_overlap.schedules.plan import Collective, Pattern

# Below this many rows a bf16 GEMM loses more than 5 % per row (measured with oneDNN on AVX-512: 256 rows 0-1 %, 128
# rows 3-7 %, 64 rows 11-20 %), and what one more cut can hide is less.
MIN_CHUNK_ROWS = 128
# A message costs two threads a wake-up, whatever its size; smaller ones than this hide less than that.
_MIN_CHUNK_BYTES = 256 * 1024
# What more messages of one op hide is less than what they cost (two and four hosts). Where 8 is no multiple of the
# peers, a gather has a few more, as its last one is exposed (four hosts, three parts against two: 0-5 % faster), and a
# scatter a few less (its parts are as many GEMMs and sums: 0-2 %). Both differences are near what those runs scattered
# by, and more than four ranks were not measured.
MAX_MESSAGES = 8
# Between two ranks, where 8 would be 6 at the usual numbers of rows: 4 parts took 2-7 % less time where communication
# takes as long as the GEMM or less, and as long where it takes twice that (61 and 41 rounds beside each other).
_MAX_PARTS = 4


def default_pattern(device_type: str) -> Pattern:
    """A ring on the CPU, where messages of several peers to one taker would share its TCP link (four hosts: 0-20 %
    slower); else direct."""
    return "ring" if device_type == "cpu" else "direct"


def default_chunks(collective: Collective, num_ranks: int, num_rows: int, row_bytes: int) -> int:
    """Chunks per rank of an all-gather or reduce-scatter of `num_rows` gathered rows of `row_bytes` each."""
    smallest = max(MIN_CHUNK_ROWS, -(-_MIN_CHUNK_BYTES // row_bytes))
    peers = max(1, num_ranks - 1)
    most = -(-MAX_MESSAGES // peers) if collective == "all_gather" else MAX_MESSAGES // peers
    return most_parts(min(most, _MAX_PARTS), num_rows // num_ranks, smallest, "last")


def most_parts(most: int, rows: int, smallest: int, small: Small) -> int:
    """The largest number of parts, up to `most`, of which the smallest still has so many rows."""
    fits = (parts for parts in range(most, 1, -1) if rows >= smallest * sum(part_weights(parts, small)))
    return next(fits, 1)
