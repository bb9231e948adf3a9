"""Host-side arguments of the kernels: tile shapes and the rule that selects one, tile tables, flags.

Aligned operands use wide tiles: their columns and depth are multiples of 16, so every row starts at a multiple of 16
bytes. The last tile may be partial. Other operands load two bytes at a time under masks and use smaller tiles, so
that no register spills. Importing this module does not need Gluon.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Self

import torch
import triton

from megatron_overlap.schedules.tile_order import RowTile

# One read of a flag takes about 1 us: the limit is a few minutes, like the timeout of a collective.
MAX_POLLS = 1 << 28
ALIGNMENT = 16
"""Triton specializes a kernel for integer arguments that are multiples of this number."""
LINE_BYTES = 16
"""TMA needs rows that start at multiples of this number of bytes."""


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """The shape of a GEMM's tiles.

    Attributes:
        block_m, block_n, block_k: rows and columns of a tile, and depth of one step of the main loop.
        group: row tiles that share columns of B in the L2 cache.
        num_stages: steps of the main loop that are prefetched.
        hopper: the GEMM kernels of `kernels.hopper_gemm`, in Gluon, compute the tiles; else the portable ones.
    """

    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    group: int = 8
    num_stages: int = 3
    num_warps: int = 8
    hopper: bool = False

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


SM80, SM90, SM100 = 80, 90, 100
ARCHITECTURES = (SM80, SM90, SM100)
ALIGNED = dict.fromkeys(ARCHITECTURES, GemmConfig(128, 256, 64, 8, 3, 8)) | {SM80: GemmConfig(128, 128, 32, 8, 4, 4)}
# Half the columns: with few rows, fewer blocks are idle in the last wave.
ALIGNED_SMALL = dict.fromkeys(ARCHITECTURES, GemmConfig(128, 128, 64, 8, 4, 8)) | {
    SM80: GemmConfig(64, 128, 32, 8, 4, 4)
}
# The Gluon kernels: rings of four and six slots fill the shared memory of a block.
HOPPER = GemmConfig(128, 256, 64, 8, 4, 8, hopper=True)
HOPPER_SMALL = GemmConfig(128, 128, 64, 8, 6, 8, hopper=True)
ODD = dict.fromkeys(ARCHITECTURES, GemmConfig(64, 64, 32, 8, 3, 4)) | {SM100: GemmConfig(64, 64, 32, 8, 3, 8)}


def newest(capability: int) -> int:
    """Return the newest known architecture whose code runs on a device of `capability`.

    Raises:
        ValueError: there is none.
    """
    known = [arch for arch in ARCHITECTURES if arch <= capability]
    if not known:
        raise ValueError(f"capability: sm_{capability}: fused kernels need sm_80 or newer; use method p2p")
    return known[-1]


def config_for(
    capability: int, rows: int, columns: int, depth: int, *, num_programs: int, other: bool = False
) -> GemmConfig:
    """Return the tile shape of a GEMM of `[rows, depth]` and `[depth, columns]` on `num_programs` blocks.

    Args:
        capability: 10 times the compute capability, see `newest`.
        other: return the aligned shape that this rule does not select.
    """
    arch = newest(capability)
    if columns % ALIGNMENT or depth % ALIGNMENT:
        return ODD[arch]
    num_tiles = triton.cdiv(rows, ALIGNED[arch].block_m) * triton.cdiv(columns, ALIGNED[arch].block_n)
    wide = num_tiles >= 2 * num_programs
    return (ALIGNED if wide != other else ALIGNED_SMALL)[arch]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Row tiles on the device, in the order in which a kernel computes them.

    Attributes:
        table: int32 `[count, 8]`, the fields of `RowTile`.
        first: length of the leading run of tiles that are all own or all remote.
    """

    table: torch.Tensor
    count: int
    first: int

    @classmethod
    def of(cls, tiles: Sequence[RowTile], device: torch.device | str) -> Self:
        """Copy `tiles` to `device`. Call it once per shape."""
        table = torch.tensor(tiles, dtype=torch.int32).reshape(len(tiles), len(RowTile._fields)).to(device)
        first = sum(1 for _ in takewhile(lambda tile: tile.remote == tiles[0].remote, tiles))
        return cls(table, len(tiles), first)


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


def tma_unsupported_reason(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> str:
    """Return why the Hopper kernels cannot compute `a @ b` of matching shapes, or an empty string."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"Hopper kernels compute in bf16 and fp16, not {a.dtype}"
    depth, columns = b.shape
    if not depth or depth % ALIGNMENT or columns % ALIGNMENT:
        return f"columns {columns} and depth {depth} must be multiples of {ALIGNMENT} for Hopper kernels"
    if 1 not in b.stride():
        return f"b: strides {b.stride()}: one must be 1 for Hopper kernels"
    matrices = {"a": a, "b": b.t() if b.stride(0) == 1 else b} | ({} if out is None else {"out": out})
    for name, matrix in matrices.items():
        row_bytes = matrix.stride(0) * matrix.itemsize
        if matrix.stride(1) != 1 or row_bytes % LINE_BYTES or matrix.data_ptr() % LINE_BYTES:
            return f"{name}: rows must be contiguous and start at multiples of {LINE_BYTES} bytes for Hopper kernels"
    return ""


def launch_gemm(
    kernel: Any,
    a: torch.Tensor,
    b: torch.Tensor,
    arguments: Sequence[Any],
    tiles: RowTiles,
    config: GemmConfig,
    num_programs: int,
    constants: Mapping[str, Any],
) -> None:
    """Launch a kernel of `a @ b`, portable or for Hopper as in `config`, unless it has no tiles.

    `arguments` follow the operands, before their strides in a portable kernel. `constants` are those of this kernel,
    besides those of every GEMM.
    """
    work = tiles.count * triton.cdiv(b.shape[1], config.block_n)
    if work == 0:
        return
    launch = kernel[(min(num_programs, work),)]
    if config.hopper:
        from megatron_overlap.kernels.gluon_version import TensorDescriptor

        transposed = b.stride(0) == 1
        dtype = "bf16" if a.dtype == torch.bfloat16 else "fp16"
        matrices, blocks = (a, b.t() if transposed else b), blocks_of(config, "nt" if transposed else "nn")
        descriptors = [
            TensorDescriptor.from_tensor(matrix, list(block), shared_layout(block, dtype))
            for matrix, block in zip(matrices, blocks, strict=True)
        ]
        launch(*descriptors, *arguments, NT=transposed, **config.constants(), **constants)
        return
    even = {"EVEN_N": b.shape[1] % config.block_n == 0, "EVEN_K": b.shape[0] % config.block_k == 0}
    strides, interpreted = (*a.stride(), *b.stride()), not isinstance(kernel, triton.JITFunction)
    launch(a, b, *arguments, *strides, WIDEN=interpreted, **even, **config.constants(), **constants)


def blocks_of(config: GemmConfig, form: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the rows and columns in memory of a tile of A and of a tile of B."""
    of_b = (config.block_n, config.block_k) if form == "nt" else (config.block_k, config.block_n)
    return (config.block_m, config.block_k), of_b


def shared_layout(block: tuple[int, int], dtype: str) -> Any:
    from megatron_overlap.kernels.gluon_version import gl

    return gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
