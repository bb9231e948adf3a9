"""What may serve a linear layer, and what a choice among it is made for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from megatron_overlap.schedules.plan import Pattern

Method = Literal["megatron", "p2p", "fused"]

Knob = tuple[str, str | int]
"""A field of `ops.tensor_parallel.fused.plan.FusedPlan` and a value that is not its default."""

_METHODS = ("megatron", "p2p", "fused")
_PATTERNS = (None, "direct", "ring", "serial")

KNOBS: dict[str, tuple[str | int, ...]] = {
    "mover": ("push", "pull", "ring"),
    "stores": ("remote", "staged"),
    "chunk_rows": (512, 128, 2048),
    "tiles": ("rule", "other"),
    "spare_sms": (0, 8),
    "kernel": ("portable", "hopper"),
}
"""What is tried of each field of a fused plan, its default first."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a linear layer, forward and backward.

    Attributes:
        method: Megatron's own path, point-to-point messages, or fused kernels.
        pattern: of p2p; None is the one of the device.
        chunks_per_rank: of p2p; None is chosen by the number of rows and their bytes.
        knobs: of fused: what is not as by default, in the order of `KNOBS`.
    """

    method: Method
    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    knobs: tuple[Knob, ...] = ()

    def __str__(self) -> str:
        if self.method == "megatron":
            return "Megatron's own"
        if self.method == "fused":
            return " ".join(["fused", *(f"{name}={value}" for name, value in self.knobs)])
        cut = f" x {self.chunks_per_rank}" if self.chunks_per_rank is not None else ""
        return f"p2p {self.pattern or ''}".rstrip() + cut

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        tree = {"method": self.method, "pattern": self.pattern, "chunks_per_rank": self.chunks_per_rank}
        return tree | ({"knobs": dict(self.knobs)} if self.knobs else {})

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Candidate:
        """The candidate that `as_dict` gave `tree` for.

        Raises:
            ValueError: it is none.
        """
        method, pattern, chunks = (tree.get(key) for key in ("method", "pattern", "chunks_per_rank"))
        knobs = tree.get("knobs", {})
        whole = chunks is None or (isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1)
        known = isinstance(knobs, dict) and all(value in KNOBS.get(name, ())[1:] for name, value in knobs.items())
        if method not in _METHODS or pattern not in _PATTERNS or not whole or not known:
            raise ValueError(f"candidate: {dict(tree)}: not a way to run a linear layer")
        return cls(method, pattern, chunks, tuple((name, knobs[name]) for name in KNOBS if name in knobs))


STOCK = Candidate("megatron")
"""Megatron's own path: what every other candidate has to beat."""

HOPPER = Candidate("fused", knobs=(("kernel", "hopper"),))
"""The kernels that are written for sm_90."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a choice is made for: calls that agree in all of it are served alike.

    Attributes:
        op: `ag_gemm`, `gemm_rs`, `copy_gemm` or `gemm_ar`.
        rows: gathered rows.
        in_features: columns of this rank's input.
        out_features: columns of this rank's output.
        dtype: of input and weight: `bfloat16`.
        ranks: size of the tensor parallel group.
        backward: whether a backward pass follows: it does not in evaluation, nor in the first pass of recomputation.
        weight: whether the weight needs a gradient.
        into_main_grad: whether its gradient is added to `main_grad` inside the op.
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
    def sums(self) -> bool:
        """Whether it is a layer without sequence parallelism, whose communication is an all-reduce."""
        return self.op in ("copy_gemm", "gemm_ar")

    @property
    def width(self) -> int:
        """Columns of what is communicated."""
        return self.in_features if self.op in ("ag_gemm", "copy_gemm") else self.out_features

    @property
    def key(self) -> str:
        """Its name in the cache."""
        marks = {"backward": self.backward, "frozen": not self.weight, "main_grad": self.into_main_grad}
        told = "".join(f" {mark}" for mark, on in marks.items() if on)
        return f"{self.op} {self.rows}x{self.in_features}x{self.out_features} {self.dtype}{told}"


def fused_variants(call: Call, hopper: bool) -> list[Candidate]:
    """Every way to run fused kernels that differs from the others for `call`, the default first.

    Args:
        call: what is asked for.
        hopper: whether the kernels that are written for sm_90 can.
    """
    shard = call.rows // call.ranks
    values = dict(KNOBS)
    if call.ranks == 2:
        values["mover"] = tuple(each for each in KNOBS["mover"] if each != "ring")  # the same copies as a push
    default, *others = KNOBS["chunk_rows"]
    # A comm tile ends with its shard: more rows than that change nothing.
    values["chunk_rows"] = (default, *(each for each in others if min(int(each), shard) != min(int(default), shard)))
    if not hopper:
        values["kernel"] = KNOBS["kernel"][:1]
    return [
        Candidate("fused", knobs=tuple((name, value) for name, value in plan if value != KNOBS[name][0]))
        for plan in product(*([(name, value) for value in values[name]] for name in KNOBS))
    ]


def one_knob_apart(first: Candidate, second: Candidate) -> bool:
    """Whether two ways to run fused kernels differ in one field of their plans."""
    left, right = ({name: values[0] for name, values in KNOBS.items()} | dict(each.knobs) for each in (first, second))
    return first.method == second.method == "fused" and sum(left[name] != right[name] for name in KNOBS) == 1
