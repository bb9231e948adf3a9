"""How a fused op moves and computes: what a tuner may choose, and a benchmark measures. The result is the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from megatron_overlap.comm.symmetric.layout import MAX_PARTS
from megatron_overlap.comm.symmetric.transport import Mover
from megatron_overlap.schedules import ChunkLayout

if TYPE_CHECKING:
    from megatron_overlap.kernels.launch import GemmConfig

Stores = Literal["remote", "staged"]
"""Where a scattering GEMM stores: at the owners, or into own memory, from where copies go to the owners."""

Tiles = Literal["rule", "other"]
"""Which of an architecture's two tile shapes: as `kernels.configs.config_for` says by the number of tiles, or not."""

Kernel = Literal["portable", "hopper"]
"""Whose GEMMs: Triton's for every device, or those with TMA and warps of their own for loads, which have never run."""


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """The same on every rank of a group.

    Attributes:
        mover: who copies an all-gather: `push` and `pull` go straight, for switches; `ring` to neighbours, for PCIe.
        stores: of a scattering GEMM. `staged` needs own memory for one more gathered activation.
        chunk_rows: rows of a comm tile, from one GEMM tile to a whole shard; there are at most 32 of them in a shard.
        spare_sms: SMs that a fused GEMM leaves to others.
        tiles: shape of GEMM tiles.
        config: another shape than these, for experiments; None takes `tiles`.
        kernel: `hopper` runs where `kernels.hopper.self_test` finds no objection and operands suit it, else `portable`.

    Raises:
        ValueError: a value is not known or out of range.
    """

    mover: Mover = "push"
    stores: Stores = "remote"
    # A message that a link needs some microseconds for, and whole GEMM tiles.
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
        """Rows of each rank and comm tile."""
        parts = num_rows // num_ranks // self.chunk_rows
        return ChunkLayout(num_rows, num_ranks, max(1, min(MAX_PARTS, parts)))
