"""Default pattern and number of chunks per rank, measured on CPU hosts, and the settings that autotuning measures."""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import product

from megatron_overlap.schedules.plan import Collective, Pattern, Small, part_weights

# With fewer rows a bf16 GEMM loses more than 5 % per row, and one more cut hides less than that. Measured with oneDNN
# on AVX-512: 256 rows 0-1 %, 128 rows 3-7 %, 64 rows 11-20 %.
MIN_CHUNK_ROWS = 128
# The most rows of a GEMM of more than two slices. On an H100 a layer of eight slices of 1,024 rows took 0.66 to 0.88 of
# the time without overlap, of 256 rows 0.88 to 0.95, and of 128 rows 1.35 to 1.41: such GEMMs only read their weight.
_MAX_SHARED_ROWS = 1024
# Of an all-gather of one part by copy engines, to one rank. The fixed time of smaller copies is longer than what a GEMM
# gains from the SMs of NCCL. Modelled for H100 (`configs/clusters/h100_dgx.yaml`), not measured.
MIN_COPY_BYTES = 2 << 20
# A GEMM of at most this depth takes about as long as the messages of its result, or less. Modelled for an H100 with
# NVLink (`tests/ops/tensor_parallel/device_layers.py`), not measured.
SHALLOW_DEPTH = 1536
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

type Knob = tuple[str, str | int]
"""A field of `ops.tensor_parallel.fused.kernels.FusedPlan` and a value that is not its default."""

KNOBS: dict[str, tuple[str | int, ...]] = {
    "mover": ("push", "pull", "ring"),
    "stores": ("remote", "staged"),
    "chunk_rows": (512, 128, 2048),
    "tiles": ("rule", "other"),
    "spare_sms": (0, 8),
    "kernel": ("portable", "hopper"),
}
"""The values of each field of a fused plan that are measured, the default first."""

_TILES = (128, 256, 1.0), (128, 128, 0.92), (64, 128, 0.75)
"""Rows and columns of the output tiles of a GEMM kernel, and its rate. The tiles are those of CUTLASS 3 for sm_90; the
rates are assumed."""
_BALANCE = 0.1
"""How much of a difference between the times of two parts counts. Less computation than messages rarely occurs."""

_CHUNKS = (1, 2, 4, 8)
# Messages of fewer rows hide less than they cost on any link.
_MIN_MESSAGE_ROWS = 4


def default_pattern(device_type: str) -> Pattern:
    """Return `ring` on the CPU and `direct` elsewhere.

    With `direct` on CPU hosts, messages of several peers share the TCP link of the receiver (4 hosts: 0-20 % slower).
    """
    return "ring" if device_type == "cpu" else "direct"


def default_chunks(
    collective: Collective, num_ranks: int, num_rows: int, row_bytes: int, *, copy_engines: bool = False
) -> int:
    """Return the chunks per rank of an all-gather or reduce-scatter of `num_rows` gathered rows of `row_bytes` each.

    With copy engines (as of `Transport`) a slice is one message, of two ranks two: a further GEMM costs a partial wave
    of tiles, and the host enqueues every message.
    """
    if copy_engines:
        return 2 if num_ranks == 2 and num_rows >= 4 * MIN_CHUNK_ROWS else 1
    smallest = max(MIN_CHUNK_ROWS, -(-_MIN_CHUNK_BYTES // row_bytes))
    peers = max(1, num_ranks - 1)
    most = -(-MAX_MESSAGES // peers) if collective == "all_gather" else MAX_MESSAGES // peers
    return most_parts(min(most, _MAX_PARTS), num_rows // num_ranks, smallest, "last")


def default_slices_per_gemm(num_ranks: int, num_rows: int, *, hidden: bool) -> int:
    """Return the largest number of slices that share a GEMM where copy engines carry the messages.

    At most half of all slices, so that a GEMM hides messages. The messages of a GEMM are one batch of copies, so two
    slices share one also where a GEMM of each would be as fast. `hidden`: the GEMM of the own rows, or work that
    follows, hides messages too. If not, at most two slices, which are shorter: the first messages are sent after the
    first GEMM. Modelled (`tests/ops/tensor_parallel/device_layers.py`), not measured.
    """
    slice_rows = max(1, num_rows // num_ranks)
    most = _MAX_SHARED_ROWS // slice_rows
    if not hidden:
        most = min(2, most)
    elif slice_rows <= _MAX_SHARED_ROWS:
        most = max(2, most)
    return max(1, min(most, num_ranks // 2))


def default_parts(num_rows: int, num_ranks: int, depth: int, *, on_device: bool) -> int:
    """Return the parts of an all-reduce of `num_rows` rows. On the CPU a part is one GEMM over the rows of all owners.

    On a device one part: further ones cost more than they hide. Two parts if the GEMMs, over `depth` features, take as
    long as all messages and stay large: they hide the sums of the first part. 0: other work hides the sums. Modelled
    (`tests/ops/tensor_parallel/device_layers.py`), not measured.
    """
    if not on_device:
        return most_parts(MAX_MESSAGES, num_rows, MIN_CHUNK_ROWS, "both")
    return 2 if depth > 2 * SHALLOW_DEPTH and num_rows >= 8 * num_ranks * MIN_CHUNK_ROWS else 1


def most_parts(most: int, rows: int, smallest: int, small: Small) -> int:
    """Return the largest number of parts, at most `most`, whose smallest part has at least `smallest` rows."""
    fits = (parts for parts in range(most, 1, -1) if rows >= smallest * sum(part_weights(parts, small)))
    return next(fits, 1)


def p2p_settings(
    num_ranks: int,
    num_rows: int,
    row_bytes: int,
    device_type: str,
    *,
    all_reduces: bool,
    pattern: Pattern | None = None,
    chunks: int | None = None,
    copy_engines: bool = False,
) -> list[tuple[Pattern | None, int | None]]:
    """Return all pairs of a pattern and chunks per rank, the default first. No two send the same messages.

    Args:
        num_ranks, num_rows, row_bytes, device_type, copy_engines: as of `default_chunks` and `default_pattern`.
        all_reduces: the layer has no sequence parallelism; its defaults are None.
        pattern, chunks: the only value allowed; None allows all.
    """
    patterns: Sequence[Pattern | None] = (pattern,)
    if pattern is None and not all_reduces:  # an all-reduce has no ring
        default = default_pattern(device_type)
        # Between two ranks a ring sends the same messages.
        patterns = ("direct",) if num_ranks == 2 else (default, "direct" if default == "ring" else "ring")
    counts: Sequence[int | None] = (chunks,)
    if chunks is None:
        first: int | None = None
        if not all_reduces:
            gathers, scatters = (
                default_chunks(collective, num_ranks, num_rows, row_bytes, copy_engines=copy_engines)
                for collective in ("all_gather", "reduce_scatter")
            )
            first = gathers if gathers == scatters else None
        most = max(1, num_rows // num_ranks // _MIN_MESSAGE_ROWS)
        counts = (first, *(count for count in _CHUNKS if count <= most and count != first))
    return [(each, count) for each in patterns for count in counts]


def max_p2p_settings(num_ranks: int) -> int:
    """Return the largest number of settings that `p2p_settings` returns for `num_ranks` ranks."""
    return (1 if num_ranks == 2 else 2) * (1 + len(_CHUNKS))


def fused_settings(num_ranks: int, num_rows: int, *, hopper: bool) -> list[tuple[Knob, ...]]:
    """Return all fused plans that differ in the work they cause, the default first. `hopper`: sm_90 kernels run."""
    shard = num_rows // num_ranks
    values = dict(KNOBS)
    if num_ranks == 2:
        values["mover"] = tuple(each for each in KNOBS["mover"] if each != "ring")  # the same copies as a push
    default, *others = KNOBS["chunk_rows"]
    # No communication tile is longer than a shard, so all chunk lengths above one shard give the same tiles.
    values["chunk_rows"] = (default, *(each for each in others if min(int(each), shard) != min(int(default), shard)))
    if not hopper:
        values["kernel"] = KNOBS["kernel"][:1]
    plans = product(*([(name, value) for value in values[name]] for name in KNOBS))
    return [tuple(knob for knob in plan if knob[1] != KNOBS[knob[0]][0]) for plan in plans]


def one_knob_apart(first: Sequence[Knob], second: Sequence[Knob]) -> bool:
    """Whether two fused plans differ in one field."""
    return len({name for name, _ in {*first} ^ {*second}}) == 1


@lru_cache
def balanced_rows(
    num_rows: int,
    num_ranks: int,
    batch: int,
    gemms: tuple[tuple[int, int], ...],
    channels: int,
    processors: int | None = None,
) -> int:
    """Return the rows of each rank in the first part of a sequence: both parts take equally long, and few waves.

    Minimizes the time of both parts plus a tenth of their difference, which may leave messages exposed. The time of a
    part is that of its GEMMs and of its causal attention in forward and backward, in multiply-adds. Queries of the
    second part also read the keys of the first. With `processors`, a GEMM takes whole waves of tiles.

    Args:
        num_rows: rows of each rank, at least 2.
        num_ranks: tensor-parallel ranks, which gather the rows.
        batch: sequences.
        gemms: columns and depth of each GEMM of a layer on one rank.
        channels: attention channels of one rank.
        processors: of the device; None: a GEMM takes as long as its multiply-adds.
    """

    def outputs(rows: int, columns: int) -> float:
        """Elements that a GEMM computes in the same time without empty tiles."""
        if processors is None:
            return rows * columns
        return min(
            math.ceil(math.ceil(rows / height) * math.ceil(columns / width) / processors)
            * (processors * height * width / rate)
            for height, width, rate in _TILES
        )

    def time(start: int, stop: int) -> float:
        rows = (stop - start) * num_ranks * batch
        # Forward, input gradient and weight gradient. The last one adds over the rows, and has the same tiles for all.
        linear = sum(
            outputs(rows, columns) * depth + outputs(rows, depth) * columns + rows * columns * depth
            for columns, depth in gemms
        )
        # Two products in forward, five in backward.
        return linear + 3.5 * batch * channels * num_ranks**2 * (stop**2 - start**2)

    def cost(at: int) -> tuple[float, float]:
        first, second = time(0, at), time(at, num_rows)
        return first + second + _BALANCE * abs(first - second), abs(at - num_rows / 2)

    return min(range(1, num_rows), key=cost)
