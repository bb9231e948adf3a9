"""The number format of gathered rows, and the GEMMs that read it.

A format travels as several tensors with one row per row of the input, for example FP8 data and scales. Partial sums and
the local operand of a GEMM keep the dtype of the input.
"""

from __future__ import annotations

from typing import Protocol

import torch

from megatron_overlap.ops.call import gemm_into
from megatron_overlap.ops.wgrad import WeightGradient

Payload = tuple[torch.Tensor, ...]
"""The encoded rows: contiguous tensors whose first dimension is the row."""


class Gemm(Protocol):
    """Encodes rows for an all-gather, and multiplies encoded rows."""

    def encode(self, rows: torch.Tensor) -> Payload:
        """`rows` `[n, K]` in this format. Each row is encoded independently of the other rows."""

    def matmul(self, rows: Payload, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """`out = rows @ b + bias`."""

    def wgrad(self, wgrad: WeightGradient, dy: torch.Tensor | Payload, x: torch.Tensor | Payload) -> None:
        """Adds `dy.T @ x` to `wgrad`. One operand is encoded."""


class PlainGemm:
    """Rows in the dtype of the input."""

    def encode(self, rows: torch.Tensor) -> Payload:
        """See `Gemm.encode`."""
        return (rows,)

    def matmul(self, rows: Payload, b: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        """See `Gemm.matmul`."""
        gemm_into(rows[0], b, out, bias)

    def wgrad(self, wgrad: WeightGradient, dy: torch.Tensor | Payload, x: torch.Tensor | Payload) -> None:
        """See `Gemm.wgrad`."""
        wgrad.add(dy[0] if isinstance(dy, tuple) else dy, x[0] if isinstance(x, tuple) else x)


PLAIN = PlainGemm()
