"""Candidates that can run a linear layer, and the kind of call that they are compared for. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

from megatron_overlap.schedules.heuristics import default_chunks, default_pattern
from megatron_overlap.schedules.plan import Pattern

type Knob = tuple[str, str | int]
"""A field of `ops.tensor_parallel.fused.plan.FusedPlan` and a value that is not its default."""

KNOBS: dict[str, tuple[str | int, ...]] = {
    "mover": ("push", "pull", "ring"),
    "stores": ("remote", "staged"),
    "chunk_rows": (512, 128, 2048),
    "tiles": ("rule", "other"),
    "spare_sms": (0, 8),
    "kernel": ("portable", "hopper"),
}
"""The values of each field of a fused plan that are measured, the default first."""

_CHUNKS = (1, 2, 4, 8)
# Messages of fewer rows hide less than they cost on any link.
_MIN_ROWS = 4


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a linear layer, forward and backward.

    Attributes:
        method: the stock path, point-to-point messages, or fused kernels.
        pattern: of p2p; None takes that of the device.
        chunks_per_rank: of p2p; None takes a number from the rows and their bytes.
        knobs: of fused: values that are not defaults, in the order of `KNOBS`.
    """

    method: Literal["stock", "p2p", "fused"]
    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    knobs: tuple[Knob, ...] = ()

    def __str__(self) -> str:
        chunks = () if self.chunks_per_rank is None else ("x", str(self.chunks_per_rank))
        knobs = (f"{name}={value}" for name, value in self.knobs)
        return " ".join((self.method, *([self.pattern] if self.pattern else ()), *chunks, *knobs))


STOCK = Candidate("stock")
"""The stock path, which every other candidate has to beat."""

HOPPER = Candidate("fused", knobs=(("kernel", "hopper"),))
"""The kernels that are written for sm_90."""


@dataclass(frozen=True, slots=True)
class Call:
    """The kind of a call: calls that agree in every attribute run the same candidate.

    Attributes:
        op: `ag_gemm`, `gemm_rs`, `copy_gemm` or `gemm_ar`.
        rows: gathered rows.
        in_features: columns of this rank's input.
        out_features: columns of this rank's output.
        dtype: of input and weight: `bfloat16`.
        ranks: size of the tensor-parallel group.
        backward: a backward pass follows: not in evaluation, nor in the first pass of activation recomputation.
        weight: the weight needs a gradient.
        into_main_grad: the op adds this gradient to `main_grad`.
    """

    op: str
    rows: int
    in_features: int
    out_features: int
    dtype: str
    ranks: int
    backward: bool = True
    weight: bool = True
    into_main_grad: bool = False

    @property
    def all_reduces(self) -> bool:
        """Whether the layer has no sequence parallelism, so that it communicates by all-reduce."""
        return self.op in ("copy_gemm", "gemm_ar")

    @property
    def width(self) -> int:
        """Columns of the communicated tensor."""
        return self.in_features if self.op in ("ag_gemm", "copy_gemm") else self.out_features

    @property
    def key(self) -> str:
        """The key in the cache."""
        flags = {"backward": self.backward, "frozen": not self.weight, "main_grad": self.into_main_grad}
        shape = f"{self.rows}x{self.in_features}x{self.out_features}"
        return " ".join([self.op, shape, self.dtype, *(flag for flag, on in flags.items() if on)])


def p2p_candidates(
    call: Call, pattern: Pattern | None, chunks: int | None, *, device_type: str, item_bytes: int
) -> list[Candidate]:
    """All p2p candidates of `call`, the default first. Under sequence parallelism no two send the same messages.

    Args:
        call: the kind of call.
        pattern: the only pattern allowed; None allows all.
        chunks: the only number of chunks allowed; None allows all.
        device_type: of the ranks; it has a default pattern.
        item_bytes: bytes of one number.
    """
    patterns: Sequence[Pattern | None] = (pattern,)
    if pattern is None and not call.all_reduces:  # an all-reduce has no ring
        default = default_pattern(device_type)
        # Between two ranks a ring sends the same messages.
        patterns = ("direct",) if call.ranks == 2 else (default, "direct" if default == "ring" else "ring")
    if chunks is not None:
        return [Candidate("p2p", each, chunks) for each in patterns]
    first = _default_chunks(call, item_bytes)
    most = max(1, call.rows // call.ranks // _MIN_ROWS)
    counts = (first, *(count for count in _CHUNKS if count <= most and count != first))
    return [Candidate("p2p", each, count) for each in patterns for count in counts]


def _default_chunks(call: Call, item_bytes: int) -> int | None:
    """The default chunks per rank of `call`; None where its passes have different defaults."""
    if call.all_reduces:
        return None
    gathers, scatters = (
        default_chunks(collective, call.ranks, call.rows, call.width * item_bytes)
        for collective in ("all_gather", "reduce_scatter")
    )
    return gathers if gathers == scatters else None


def max_candidates(ranks: int, *, fused: bool) -> int:
    """The most candidates that a layer of `ranks` ranks has in round 0, the stock path included."""
    return 1 + (1 if ranks == 2 else 2) * (1 + len(_CHUNKS)) + 2 * fused


def fused_variants(call: Call, *, hopper: bool) -> list[Candidate]:
    """All fused candidates that differ in what `call` makes of them, the default first. `hopper`: sm_90 kernels run."""
    shard = call.rows // call.ranks
    values = dict(KNOBS)
    if call.ranks == 2:
        values["mover"] = tuple(each for each in KNOBS["mover"] if each != "ring")  # the same copies as a push
    default, *others = KNOBS["chunk_rows"]
    # A tile of communication ends with its shard: chunks longer than a shard are all alike.
    values["chunk_rows"] = (default, *(each for each in others if min(int(each), shard) != min(int(default), shard)))
    if not hopper:
        values["kernel"] = KNOBS["kernel"][:1]
    plans = product(*([(name, value) for value in values[name]] for name in KNOBS))
    return [Candidate("fused", knobs=tuple(knob for knob in plan if knob[1] != KNOBS[knob[0]][0])) for plan in plans]


def one_knob_apart(first: Candidate, second: Candidate) -> bool:
    """Whether two fused candidates differ in one field of their plans."""
    changed = {*first.knobs} ^ {*second.knobs}
    return first.method == second.method == "fused" and len({name for name, _ in changed}) == 1
