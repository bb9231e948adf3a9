"""How a fused operation moves bytes and computes tiles: its plan, and the kernels, tile shapes and tables that follow.

None of it affects the result. The first operation imports Triton, not this module.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from megatron_overlap.comm.symmetric.transport import MAX_PARTS, Mover, SymmetricTransport
from megatron_overlap.schedules import ChunkLayout
from megatron_overlap.schedules.heuristics import KNOBS

if TYPE_CHECKING:
    from megatron_overlap.kernels.launch import GemmConfig


@dataclass(frozen=True, slots=True)
class FusedPlan:
    """How a fused operation moves bytes and computes tiles; the same on every rank of a group.

    Attributes:
        mover: how an all-gather is copied: `push` and `pull` directly, for switches; `ring` to neighbours, for PCIe.
        stores: where a scattering GEMM stores: in the memory of the owners, or in staging memory for one more gathered
            activation, from which copies send it. A rank whose kernels cannot set flags at its peers always stages.
        chunk_rows: rows of a communication tile, from one GEMM tile to a whole shard; at most 32 tiles per shard.
        spare_sms: SMs that a fused GEMM does not use.
        tiles: which of the two shapes of GEMM tiles: the result of `kernels.launch.config_for`, or the other one.
        kernel: `portable` Triton, or `hopper` with TMA and load warps where the self-test passes and the operands meet
            its requirements. An H200 has run both.

    Raises:
        ValueError: a value is unknown or out of range.
    """

    mover: Mover = "push"
    stores: Literal["remote", "staged"] = "remote"
    # A few microseconds on a link, and a multiple of a GEMM tile.
    chunk_rows: int = 512
    spare_sms: int = 0
    tiles: Literal["rule", "other"] = "rule"
    kernel: Literal["portable", "hopper"] = "portable"

    def __post_init__(self) -> None:
        for name in ("mover", "stores", "tiles", "kernel"):
            if getattr(self, name) not in KNOBS[name]:
                raise ValueError(f"{name}: {getattr(self, name)}: must be one of {', '.join(map(str, KNOBS[name]))}")
        for name, least in (("chunk_rows", 1), ("spare_sms", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)}: must be at least {least}")

    def layout(self, num_rows: int, num_ranks: int) -> ChunkLayout:
        """Return the rows of each rank and communication tile."""
        parts = num_rows // num_ranks // self.chunk_rows
        return ChunkLayout(num_rows, num_ranks, max(1, min(MAX_PARTS, parts)))


class Hopper:
    """Selects Hopper kernels on one transport.

    Attributes:
        unsupported_reason: why they cannot run on the device of this rank; empty if they can.
        not_used: number of GEMMs that ran the portable kernel instead, by reason.
    """

    def __init__(self, unsupported_reason: str) -> None:
        self.unsupported_reason, self.not_used = unsupported_reason, Counter[str]()

    @classmethod
    def of(cls, transport: SymmetricTransport) -> Hopper:
        """Return the object of `transport`. The first call runs the self-test on its device, which can take minutes."""
        if "hopper" not in transport.tables:
            from megatron_overlap.kernels.hopper_self_test import hopper_unsupported_reason

            device = transport.backend.device
            reason = f"Hopper kernels need CUDA, not {device.type}"
            transport.tables["hopper"] = cls(hopper_unsupported_reason(device) if device.type == "cuda" else reason)
        found: Hopper = transport.tables["hopper"]
        return found

    @staticmethod
    def reasons(transport: SymmetricTransport) -> dict[str, int]:
        """Return `not_used` of `transport`; empty if no plan requested Hopper kernels."""
        found = transport.tables.get("hopper")
        return {} if found is None else dict(found.not_used)

    def config(self, a: torch.Tensor, b: torch.Tensor, portable: GemmConfig, out: torch.Tensor | None) -> GemmConfig:
        """Return the tile shape of a Hopper kernel for `a @ b`, or `portable` if it cannot run."""
        from megatron_overlap.kernels.launch import HOPPER, HOPPER_SMALL, tma_unsupported_reason

        reason = self.unsupported_reason or tma_unsupported_reason(a, b, out)
        if reason:
            self.not_used[reason] += 1
            return portable
        # The output tiles of the portable kernel with another depth, number of stages and number of warps.
        config = HOPPER_SMALL if portable.block_n <= HOPPER_SMALL.block_n else HOPPER
        return replace(config, group=portable.group)


class FusedKernels:
    """Tile shapes and tables of row tiles for one operation."""

    def __init__(self, transport: SymmetricTransport, plan: FusedPlan) -> None:
        self._transport, self._plan = transport, plan
        self.programs = max(1, transport.backend.num_sms - plan.spare_sms)
        # The first use of a transport runs the self-test of the kernels, so it comes before the operation starts.
        self._hopper = Hopper.of(transport) if plan.kernel == "hopper" else None

    def table(self, layout: ChunkLayout, order: str, block: int) -> Any:
        """Return a cached device table of row tiles in order of `arrival` or `departure`, or of `own` rows."""
        from megatron_overlap.kernels.launch import RowTiles
        from megatron_overlap.schedules.tile_order import arrival_order, departure_order, row_tiles

        transport = self._transport
        key = (layout, order, block)
        if key not in transport.tables:
            chunks = (departure_order if order == "departure" else arrival_order)(layout, transport.rank)
            if order == "own":
                chunks = [chunk for chunk in chunks if chunk.owner == transport.rank]
            tiles = row_tiles(layout, transport.rank, chunks, block)
            transport.tables[key] = RowTiles.of(tiles, transport.backend.device)
        return transport.tables[key]

    def config(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> GemmConfig:
        """The tile shape of `a @ b`. It selects the kernel."""
        from megatron_overlap.kernels.launch import config_for

        capability, other = self._transport.backend.capability, self._plan.tiles == "other"
        depth, columns = b.shape
        config = config_for(capability, a.shape[0], columns, depth, num_programs=self.programs, other=other)
        return config if self._hopper is None else self._hopper.config(a, b, config, out)
