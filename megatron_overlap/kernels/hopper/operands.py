"""Operand requirements of the Hopper kernels, and TMA descriptors. Importing this module does not need Gluon."""

from __future__ import annotations

from typing import Any

import torch

from megatron_overlap.kernels.configs import ALIGNMENT, HOPPER_TILES
from megatron_overlap.kernels.launch import GemmConfig

LINE_BYTES = 16
"""TMA needs rows that start at multiples of this number of bytes."""


def unsupported_reason(a: torch.Tensor, b: torch.Tensor, config: GemmConfig, out: torch.Tensor | None = None) -> str:
    """Return why TMA and wgmma cannot compute `a @ b` in tiles of `config`, or an empty string.

    The caller has checked that the shapes match.
    """
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
    """Check the operands.

    Raises:
        ValueError: `unsupported_reason` returns a reason.
    """
    reason = unsupported_reason(a, b, config, out)
    if reason:
        raise ValueError(reason)


def descriptors(a: torch.Tensor, b: torch.Tensor, config: GemmConfig) -> tuple[Any, Any, bool]:
    """Return the TMA descriptors of `a` and `b`, and whether `b` is a transposed weight (`nt`, depth contiguous)."""
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
    """Return the rows and columns in memory of a tile of A and of a tile of B."""
    of_b = (config.block_n, config.block_k) if form == "nt" else (config.block_k, config.block_n)
    return (config.block_m, config.block_k), of_b


def shared_layout(block: tuple[int, int], dtype: str) -> Any:
    """Return the shared memory layout of a tile."""
    from megatron_overlap.kernels.hopper.gluon_version import gl

    return gl.NVMMASharedLayout.get_default_for(list(block), {"bf16": gl.bfloat16, "fp16": gl.float16}[dtype])
