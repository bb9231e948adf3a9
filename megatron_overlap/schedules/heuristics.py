"""Default pattern and default number of chunks per rank. Measured on CPU hosts."""

from __future__ import annotations

from megatron_overlap.schedules.layout import Small, part_weights
from megatron_overlap.schedules.plan import Collective, Pattern

# With fewer rows a bf16 GEMM loses more than 5 % per row, and one more cut hides less than that. Measured with oneDNN
# on AVX-512: 256 rows 0-1 %, 128 rows 3-7 %, 64 rows 11-20 %.
MIN_CHUNK_ROWS = 128
# Each message wakes up two threads. A smaller message hides less time than the wake-ups cost.
_MIN_CHUNK_BYTES = 256 * 1024
# Beyond eight messages per operation, per-message overhead exceeds the extra overlap (measured on 2 and 4 hosts). If 8
# is not a multiple of the number of peers, a gather rounds up, because its last message is exposed (4 hosts, 3 parts
# instead of 2: 0-5 % faster). A scatter rounds down, because each part adds a GEMM and a sum (0-2 %). Both differences
# are close to the noise of the runs. More than four ranks are not measured.
MAX_MESSAGES = 8
# Limit for two ranks, where row counts often permit only 6 of 8 parts: 4 parts take 2-7 % less time than 6 if
# communication takes at most as long as the GEMM, and the same time if it takes twice as long (61 and 41 rounds).
_MAX_PARTS = 4


def default_pattern(device_type: str) -> Pattern:
    """Return `ring` on the CPU and `direct` elsewhere.

    With `direct` on CPU hosts, messages of several peers share the TCP link of the receiver (4 hosts: 0-20 % slower).
    """
    return "ring" if device_type == "cpu" else "direct"


def default_chunks(collective: Collective, num_ranks: int, num_rows: int, row_bytes: int) -> int:
    """Return the chunks per rank of an all-gather or reduce-scatter of `num_rows` gathered rows of `row_bytes` each."""
    smallest = max(MIN_CHUNK_ROWS, -(-_MIN_CHUNK_BYTES // row_bytes))
    peers = max(1, num_ranks - 1)
    most = -(-MAX_MESSAGES // peers) if collective == "all_gather" else MAX_MESSAGES // peers
    return most_parts(min(most, _MAX_PARTS), num_rows // num_ranks, smallest, "last")


def most_parts(most: int, rows: int, smallest: int, small: Small) -> int:
    """Return the largest number of parts, at most `most`, whose smallest part has at least `smallest` rows."""
    fits = (parts for parts in range(most, 1, -1) if rows >= smallest * sum(part_weights(parts, small)))
    return next(fits, 1)
