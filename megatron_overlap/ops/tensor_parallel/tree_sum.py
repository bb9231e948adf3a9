"""Sums in a fixed binary tree, which have the same bits on 1, 2 and 4 ranks, also over a sharded K.

K is cut into `NUM_BLOCKS` blocks. The products of the blocks are the leaves, in the order of K. A rank adds those of
its blocks; the tree continues with the sums of the ranks. Each sum is rounded to the dtype of the GEMM.
"""

from collections.abc import Sequence

import torch

NUM_BLOCKS = 4
"""Leaves of the tree, and the most ranks."""
MIN_ROWS = 16
"""Of a GEMM. With 1 to 3 rows in fp32 the bits of a row depend on the number of rows, measured on one CPU."""


def unsupported_reason(num_ranks: int, depth: int, num_rows: int) -> str | None:
    """The reason that a GEMM with `depth` columns of K on each of `num_ranks` ranks has no tree.

    `num_rows`: rows of the smallest GEMM of the operation.
    """
    if NUM_BLOCKS % num_ranks:
        return f"tp_invariant needs 1, 2 or {NUM_BLOCKS} tensor-parallel ranks"
    if depth * num_ranks % NUM_BLOCKS:
        return f"tp_invariant needs a divided dimension of the weight that is a multiple of {NUM_BLOCKS}"
    if num_rows < MIN_ROWS:
        return f"tp_invariant needs GEMMs of {MIN_ROWS} rows or more"
    return None


def tree_gemm_into(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, num_ranks: int) -> None:
    """`out = a @ b`, where `a` and `b` are the share of one of `num_ranks` ranks."""
    width = a.shape[1] * num_ranks // NUM_BLOCKS
    products = [torch.mm(x, y) for x, y in zip(a.split(width, dim=1), b.split(width), strict=True)]
    out.copy_(tree_sum(products))


def tree_sum(terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """The sum of a power of two of terms: neighbours first, then neighbouring sums."""
    while len(terms) > 1:
        terms = [x + y for x, y in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]
