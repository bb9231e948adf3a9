"""Candidates that can run a linear layer or a block, and the kind of call that they are compared for. Pure."""

from dataclasses import dataclass
from typing import Literal

from megatron_overlap.schedules.heuristics import Knob
from megatron_overlap.schedules.plan import Pattern


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to run a linear layer or a block of transformer layers, forward and backward.

    Attributes:
        method: of a linear layer: the stock path, point-to-point messages, or fused kernels. Of a block: its linear
            layers with their own candidates, or batch overlap, with parts of the batch or of each sequence.
        pattern: of p2p; None takes that of the device.
        chunks_per_rank: of p2p; None takes a number from the rows and their bytes.
        knobs: options of fused that differ from their defaults, in the order of `schedules.heuristics.KNOBS`.
    """

    method: Literal["stock", "p2p", "fused", "separate layers", "batch overlap", "sequence overlap"]
    pattern: Pattern | None = None
    chunks_per_rank: int | None = None
    knobs: tuple[Knob, ...] = ()

    def __str__(self) -> str:
        chunks = None if self.chunks_per_rank is None else f"x {self.chunks_per_rank}"
        return " ".join(filter(None, (self.method, self.pattern, chunks, *(f"{name}={v}" for name, v in self.knobs))))


STOCK, SEPARATE_LAYERS = Candidate("stock"), Candidate("separate layers")
"""The bases of a linear layer and of a block, which every other candidate has to beat."""

BATCH_OVERLAP, SEQUENCE_OVERLAP = Candidate("batch overlap"), Candidate("sequence overlap")
"""The other candidate of a block: `overlap.tensor.split` is batch, or sequence."""

EXPERTS = "experts"
"""The op of a mixture-of-experts layer: dispatch, experts and combine."""

FUSED, HOPPER = Candidate("fused"), Candidate("fused", knobs=(("kernel", "hopper"),))
"""The portable fused kernels, and those for sm_90."""


@dataclass(frozen=True, slots=True)
class Call:
    """The kind of a call: calls of a group that agree in every attribute run the same candidate.

    Attributes:
        op: `ag_gemm`, `gemm_rs`, `copy_gemm` or `gemm_ar`; `block` for the layers of a transformer block; or `EXPERTS`.
        rows: gathered rows; of experts the most rows that a rank sends in the first call.
        in_features: columns of this rank's input.
        out_features: columns of this rank's output.
        dtype: of input and weight: `bfloat16`.
        backward: a backward pass follows: not in evaluation, nor in the first pass of activation recomputation.
        variant: further properties that change its time, such as `main_grad`: the op adds the weight gradient to it.
    """

    op: str
    rows: int
    in_features: int
    out_features: int
    dtype: str
    backward: bool = True
    variant: str = ""

    @property
    def all_reduces(self) -> bool:
        """Whether the layer has no sequence parallelism, so that it communicates by all-reduce."""
        return self.op in ("copy_gemm", "gemm_ar")

    @property
    def key(self) -> str:
        """The key in the cache."""
        shape = f"{self.rows}x{self.in_features}x{self.out_features}"
        return f"{self.op} {shape} {self.dtype} {'backward ' * self.backward}{self.variant}".rstrip()
