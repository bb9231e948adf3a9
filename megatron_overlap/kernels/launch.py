"""What the kernels' launchers share on the host: tile shapes, tables, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import triton

from megatron_overlap.schedules.tile_order import RowTile

# A look at a flag takes about a microsecond: minutes, as the deadline of a collective.
MAX_POLLS = 1 << 28


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The shape of a GEMM's tiles.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: depth of one step of the main loop.
        group: row tiles that share their columns of B in the L2.
        num_stages: steps of the main loop that are loaded ahead.
        num_warps: warps of a block.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    num_stages: int = 3
    num_warps: int = 8

    def constants(self) -> dict[str, int]:
        """Arguments of a GEMM kernel and of its launch."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "GROUP": self.group,
            "NUM_STAGES": self.num_stages,
            "num_warps": self.num_warps,
        }


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Row tiles on the device, in the order in which a kernel takes them.

    Attributes:
        table: int32 `[count, 8]`, the fields of `RowTile`.
        count: number of tiles.
        first: how many of them, from the first one on, are own, or are others'.
        rows: row after the last one of any tile.
        block: most rows of one tile.
    """

    table: torch.Tensor
    count: int
    first: int
    rows: int
    block: int

    @classmethod
    def of(cls, tiles: Sequence[RowTile], device: torch.device | str) -> RowTiles:
        """Puts `tiles` on `device`. Costs a copy: make a table once for each shape."""
        table = torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), len(RowTile._fields)).to(device)
        first = sum(1 for _ in takewhile(lambda tile: tile.remote == tiles[0].remote, tiles))
        rows = max((tile.stop for tile in tiles), default=0)
        return cls(table, len(tiles), first, rows, max((tile.stop - tile.start for tile in tiles), default=0))


@dataclass(frozen=True, slots=True)
class Waits:
    """Flags that a kernel waits for.

    Attributes:
        flags: int32, one a chunk, raised to `epoch` by whoever delivers it.
        epoch: what a flag must have reached; one more with every use of the same flags, never reset.
        status: int32 `[1]`; becomes the epoch of a wait that was given up.
        max_polls: looks at a flag before a wait is given up.
    """

    flags: torch.Tensor
    epoch: int
    status: torch.Tensor
    max_polls: int = MAX_POLLS


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which was decided when triton was imported."""
    return bool(triton.knobs.runtime.interpret)


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    tiles: RowTiles,
    config: GemmConfig,
) -> None:
    """Refuses operands that a kernel would read or write past their end.

    Raises:
        ValueError: shapes, dtypes or strides do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0] or a.dtype != b.dtype:
        raise ValueError(f"b: {b.dtype} {tuple(b.shape)} does not fit a of {a.dtype} {tuple(a.shape)}")
    if tiles.rows > a.shape[0]:
        raise ValueError(f"tiles: reach row {tiles.rows}, a has {a.shape[0]} rows")
    if tiles.block > config.block_m:
        raise ValueError(f"tiles: {tiles.block} rows, more than block_m {config.block_m}; cut them by block_m")
    if bias is not None and (bias.shape != b.shape[1:] or not bias.is_contiguous()):
        raise ValueError(f"bias: shape {tuple(bias.shape)}: must be ({b.shape[1]},), contiguous")
    if out is not None and (out.shape != (a.shape[0], b.shape[1]) or out.stride(1) != 1 or out.dtype != a.dtype):
        raise ValueError(
            f"out: {out.dtype} {tuple(out.shape)}: must be {a.dtype} ({a.shape[0]}, {b.shape[1]}), rows contiguous"
        )
