"""Tile shapes of the GEMM kernels for each architecture, and the rule that selects one.

Aligned operands use wide tiles: their columns and depth are multiples of 16, so every row starts at a multiple of 16
bytes. The last tile may be partial. Other operands load two bytes at a time under masks and use smaller tiles, so
that no register spills.
"""

from __future__ import annotations

from megatron_overlap.kernels.launch import GemmConfig

ALIGNMENT = 16
"""Triton specializes a kernel for integer arguments that are multiples of this number."""

SM80, SM90, SM100 = 80, 90, 100
ARCHITECTURES = (SM80, SM90, SM100)
ALIGNED = {
    SM80: GemmConfig(128, 128, 32, 8, 4, 4),
    SM90: GemmConfig(128, 256, 64, 8, 3, 8),
    SM100: GemmConfig(128, 256, 64, 8, 3, 8),
}
# Half the columns: with few rows, fewer blocks are idle in the last wave.
ALIGNED_SMALL = {
    SM80: GemmConfig(64, 128, 32, 8, 4, 4),
    SM90: GemmConfig(128, 128, 64, 8, 4, 8),
    SM100: GemmConfig(128, 128, 64, 8, 4, 8),
}
# The Gluon kernels: rings of four and six slots fill the shared memory of a block.
HOPPER = GemmConfig(128, 256, 64, 8, 4, 8)
HOPPER_SMALL = GemmConfig(128, 128, 64, 8, 6, 8)
HOPPER_TILES = tuple((config.block_m, config.block_n, config.block_k) for config in (HOPPER, HOPPER_SMALL))
ODD = dict.fromkeys(ARCHITECTURES, GemmConfig(64, 64, 32, 8, 3, 4)) | {SM100: GemmConfig(64, 64, 32, 8, 3, 8)}
# Adding to the previous gradient doubles the live accumulator registers: wider tiles spill.
WGRAD = {
    SM80: GemmConfig(128, 128, 32, 8, 3, 8),
    SM90: GemmConfig(128, 128, 64, 8, 4, 8),
    SM100: GemmConfig(128, 128, 64, 8, 4, 8),
}
WGRAD_ODD = dict.fromkeys(ARCHITECTURES, GemmConfig(64, 32, 32, 8, 3, 4)) | {SM100: GemmConfig(64, 32, 16, 8, 3, 4)}


def newest(capability: int) -> int:
    """Return the newest known architecture whose code runs on a device of `capability`.

    Raises:
        ValueError: the device is older than sm_80.
    """
    known = [arch for arch in ARCHITECTURES if arch <= capability]
    if not known:
        raise ValueError(f"capability: sm_{capability}: fused kernels need sm_80 or newer; use method p2p")
    return known[-1]


def config_for(capability: int, *, aligned: bool, num_tiles: int, num_programs: int, other: bool = False) -> GemmConfig:
    """Return the tile shape of a GEMM.

    Args:
        capability: 10 times the compute capability. A capability newer than `ARCHITECTURES` uses the newest of them.
        aligned: columns and depth are multiples of `ALIGNMENT`.
        num_tiles: tiles of the whole GEMM, in tiles of `ALIGNED`.
        num_programs: blocks of the persistent grid.
        other: return the aligned shape that this rule does not select.

    Raises:
        ValueError: the device is older than sm_80.
    """
    arch = newest(capability)
    if not aligned:
        return ODD[arch]
    wide = num_tiles >= 2 * num_programs
    return (ALIGNED if wide != other else ALIGNED_SMALL)[arch]
