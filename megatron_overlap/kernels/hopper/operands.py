"""What the Hopper kernels ask of their operands, and the descriptors by which TMA finds them. Needs no Gluon."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overlap.kernels.configs import ALIGNMENT, HOPPER_TILES
from megatron_overlap.kernels.launch import GemmConfig

LINE_BYTES = 16
"""TMA finds rows that start at multiples of this."""


def objection(a: torch.Tensor, b: torch.Tensor, config: GemmConfig, out: torch.Tensor | None = None) -> str:
    """Why TMA and wgmma cannot make `a @ b` in tiles of `config`; empty if they can. Shapes fit each other."""
    if a.dtype not in (torch.bfloat16, torch.float16):
        return f"Hopper kernels compute in bf16 and fp16, not {a.dtype}"
    if (config.block_m, config.block_n, config.block_k) not in HOPPER_TILES or config.num_warps != 8:
        return f"Hopper kernels have tiles of {HOPPER_TILES} and 8 warps, not {config}"
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


def check_operands(a: torch.Tensor, b: torch.Tensor, config: GemmConfig, out: torch.Tensor | None = None) -> None:
    """Refuses what `objection` objects to.

    Raises:
        ValueError: with the reason.
    """
    reason = objection(a, b, config, out)
    if reason:
        raise ValueError(reason)


def descriptors(a: torch.Tensor, b: torch.Tensor, config: GemmConfig) -> tuple[Any, Any, bool]:
    """How TMA loads tiles of `a` and `b`, and whether `b` is a transposed weight (`nt`, depth contiguous)."""
    from megatron_overlap.kernels.hopper.gluon_version import TensorDescriptor

    transposed = b.stride(0) == 1
    blocks = blocks_of(config, "nt" if transposed else "nn")
    dtype = "bf16" if a.dtype == torch.bfloat16 else "fp16"
    found = [
        TensorDescriptor.from_tensor(matrix, list(block), shared_layout(block, dtype))
        for matrix, block in zip((a, b.t() if transposed else b), blocks, strict=True)
    ]
    return found[0], found[1], transposed


def blocks_of(config: GemmConfig, form: str) -> tuple[tuple[int, int], tuple[int, int]]:
    """Rows and columns, as they lie in memory, of a tile of A and of B."""
    of_b = (config.block_n, config.block_k) if form == "nt" else (config.block_k, config.block_n)
    return (config.block_m, config.block_k), of_b


def shared_layout(block: tuple[int, int], dtype: str) -> Any:
    """How a tile lies in shared memory."""
    from megatron_overlap.kernels.hopper.gluon_version import gl

    return gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
