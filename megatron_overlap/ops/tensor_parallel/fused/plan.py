"""Tuning parameters of fused operations: data movement and tiles. They do not affect the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from megatron_overlap.comm.symmetric.layout import MAX_PARTS
from megatron_overlap.comm.symmetric.transport import Mover
from megatron_overlap.schedules import ChunkLayout

if TYPE_CHECKING:
    from megatron_overlap.kernels.launch import GemmConfig

Stores = Literal["remote", "staged"]
"""Where a scattering GEMM stores: in the memory of the owners, or in staging memory, from which copies send it."""

Tiles = Literal["rule", "other"]
"""Which of the two tile shapes of an architecture: the result of `kernels.configs.config_for`, or the other one."""

Kernel = Literal["portable", "hopper"]
"""GEMM kernels: portable Triton, or Hopper kernels with TMA and load warps. Not yet run on a GPU."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """How a fused operation moves bytes and computes tiles; the same on every rank of a group.

    Attributes:
        mover: how an all-gather is copied: `push` and `pull` directly, for switches; `ring` to neighbours, for PCIe.
        stores: of a scattering GEMM. `staged` needs memory for one more gathered activation.
        chunk_rows: rows of a communication tile, from one GEMM tile to a whole shard; at most 32 tiles per shard.
        spare_sms: SMs that a fused GEMM does not use.
        tiles: shape of GEMM tiles.
        config: an explicit tile shape for experiments; None selects by `tiles`.
        kernel: `hopper` runs where the self-test passes and the operands meet its requirements, else `portable`.

    Raises:
        ValueError: a value is unknown or out of range.
    """

    mover: Mover = "push"
    stores: Stores = "remote"
    # A few microseconds on a link, and a multiple of a GEMM tile.
    chunk_rows: int = 512
    spare_sms: int = 0
    tiles: Tiles = "rule"
    config: GemmConfig | None = field(default=None)
    kernel: Kernel = "portable"

    def __post_init__(self) -> None:
        for name, known in (
            ("mover", get_args(Mover)),
            ("stores", get_args(Stores)),
            ("tiles", get_args(Tiles)),
            ("kernel", get_args(Kernel)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}: {getattr(self, name)}: must be one of {', '.join(known)}")
        if self.chunk_rows < 1:
            raise ValueError(f"chunk_rows: {self.chunk_rows}: must be at least 1")
        if self.spare_sms < 0:
            raise ValueError(f"spare_sms: {self.spare_sms}: must be at least 0")

    def layout(self, num_rows: int, num_ranks: int) -> ChunkLayout:
        """Return the rows of each rank and communication tile."""
        parts = num_rows // num_ranks // self.chunk_rows
        return ChunkLayout(num_rows, num_ranks, max(1, min(MAX_PARTS, parts)))
