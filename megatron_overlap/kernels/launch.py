"""Host-side arguments of the kernels: tile shapes, tile tables, flags, and operand checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
import triton

from megatron_overlap.schedules.tile_order import RowTile

# One read of a flag takes about 1 us: the limit is a few minutes, like the timeout of a collective.
MAX_POLLS = 1 << 28


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The shape of a GEMM's tiles.

    Attributes:
        block_m: rows of a tile.
        block_n: columns of a tile.
        block_k: depth of one step of the main loop.
        group: row tiles that share columns of B in the L2 cache.
        num_stages: steps of the main loop that are prefetched.
        num_warps: warps of a block.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    num_stages: int = 3
    num_warps: int = 8

    def constants(self) -> dict[str, int]:
        """Return the compile-time arguments of a GEMM kernel and `num_warps`."""
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
    """Row tiles on the device, in the order in which a kernel computes them.

    Attributes:
        table: int32 `[count, 8]`, the fields of `RowTile`.
        count: number of tiles.
        first: length of the leading run of tiles that are all own or all remote.
        rows: largest `stop` of any tile.
        block: rows of the largest tile.
    """

    table: torch.Tensor
    count: int
    first: int
    rows: int
    block: int

    @classmethod
    def of(cls, tiles: Sequence[RowTile], device: torch.device | str) -> RowTiles:
        """Copy `tiles` to `device`. Call it once per shape."""
        table = torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), len(RowTile._fields)).to(device)
        first = sum(1 for _ in takewhile(lambda tile: tile.remote == tiles[0].remote, tiles))
        rows = max((tile.stop for tile in tiles), default=0)
        return cls(table, len(tiles), first, rows, max((tile.stop - tile.start for tile in tiles), default=0))


@dataclass(frozen=True, slots=True)
class Waits:
    """Flags that a kernel waits for.

    Attributes:
        flags: int32, one per chunk. The sender of a chunk sets its flag to `epoch`.
        epoch: value that a flag must reach. It increases by 1 with every use of the same flags and is never reset.
        status: int32 `[1]`. A kernel writes the epoch of a wait that timed out.
        max_polls: reads of a flag before a wait times out.
    """

    flags: torch.Tensor
    epoch: int
    status: torch.Tensor
    max_polls: int = MAX_POLLS


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter. Triton selects it at import."""
    return bool(triton.knobs.runtime.interpret)


def check_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    bias: torch.Tensor | None,
    tiles: RowTiles,
    config: GemmConfig,
) -> None:
    """Check that a kernel neither reads nor writes past the end of its operands.

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
