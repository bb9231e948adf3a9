"""What may serve a linear layer, and what a choice among it is made for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_overlap.schedules.plan import Pattern

Method = Literal["megatron", "p2p", "fused"]

_METHODS = ("megatron", "p2p", "fused")
_PATTERNS = (None, "direct", "ring", "serial")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a linear layer, forward and backward.

    Attributes:
        method: Megatron's own path, point-to-point messages, or fused kernels.
        pattern: of p2p; None is the one of the device.
        chunks_per_rank: of p2p; None is chosen by the number of rows and their bytes.
    """

    method: Method
    pattern: Pattern | None = None
    chunks_per_rank: int | None = None

    def __str__(self) -> str:
        if self.method != "p2p":
            return "Megatron's own" if self.method == "megatron" else self.method
        cut = f" x {self.chunks_per_rank}" if self.chunks_per_rank is not None else ""
        return f"p2p {self.pattern or ''}".rstrip() + cut

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"method": self.method, "pattern": self.pattern, "chunks_per_rank": self.chunks_per_rank}

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> Candidate:
        """The candidate that `as_dict` gave `tree` for.

        Raises:
            ValueError: it is none.
        """
        method, pattern, chunks = (tree.get(key) for key in ("method", "pattern", "chunks_per_rank"))
        whole = chunks is None or (isinstance(chunks, int) and not isinstance(chunks, bool) and chunks >= 1)
        if method not in _METHODS or pattern not in _PATTERNS or not whole:
            raise ValueError(f"candidate: {dict(tree)}: not a way to run a linear layer")
        return cls(method, pattern, chunks)


OWN = Candidate("megatron")
"""Megatron's own path: what every other candidate has to beat."""


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
    def key(self) -> str:
        """Its name in the cache."""
        marks = {"backward": self.backward, "frozen": not self.weight, "main_grad": self.into_main_grad}
        told = "".join(f" {mark}" for mark, on in marks.items() if on)
        return f"{self.op} {self.rows}x{self.in_features}x{self.out_features} {self.dtype}{told}"
