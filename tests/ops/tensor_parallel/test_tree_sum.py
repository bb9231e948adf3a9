"""The fixed tree of sums: the shares of 1, 2 and 4 ranks have the same bits."""

from __future__ import annotations

import pytest
import torch

from megatron_overlap.ops import LinearPlan
from megatron_overlap.ops.tensor_parallel.tree_sum import tree_gemm_into, tree_sum, unsupported_reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shares_have_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(shape, generator=generator).to(dtype) for shape in ((48, 256), (256, 40)))
    results = []
    for num_ranks in (1, 2, 4):
        shares = [torch.empty(48, 40, dtype=dtype) for _ in range(num_ranks)]
        for x, y, out in zip(a.chunk(num_ranks, dim=1), b.chunk(num_ranks), shares, strict=True):
            tree_gemm_into(x, y, out, num_ranks)
        results.append(tree_sum(shares))
    assert all(torch.equal(result, results[0]) for result in results)
    exact = a.double() @ b.double()
    assert (results[0] - exact).abs().max() <= 4 * torch.finfo(dtype).eps * exact.abs().max()
    assert not torch.equal(results[0], a @ b), "the blocks change the bits of one GEMM"


def test_what_has_no_tree_is_named() -> None:
    assert [unsupported_reason(ranks, 8, 16) for ranks in (1, 2, 4)] == [None] * 3
    assert unsupported_reason(2, 6, 16) is None, "three columns of K for each block"
    assert unsupported_reason(8, 8, 16) == "tp_invariant needs 1, 2 or 4 tensor-parallel ranks"
    assert unsupported_reason(3, 8, 16) == "tp_invariant needs 1, 2 or 4 tensor-parallel ranks"
    assert (
        unsupported_reason(2, 5, 16) == "tp_invariant needs a divided dimension of the weight that is a multiple of 4"
    )
    assert unsupported_reason(2, 8, 15) == "tp_invariant needs GEMMs of 16 rows or more"


@pytest.mark.parametrize(
    ("op", "num_ranks", "chunks", "num_rows", "fewest"),
    [
        ("ag_gemm", 4, None, 67, 16),
        ("ag_gemm", 4, None, 64, 16),
        ("ag_gemm", 2, 3, 64, 8),
        ("gemm_rs", 2, 3, 64, 8),
        ("gemm_rs", 4, None, 63, 15),
        ("gemm_ar", 4, None, 17, 17),
        ("gemm_ar", 4, 3, 64, 16),
        ("copy_gemm", 4, 3, 17, 17),
        ("gemm_ar", 1, None, 5, 5),
    ],
)
def test_the_rows_of_the_smallest_gemm(op: str, num_ranks: int, chunks: int | None, num_rows: int, fewest: int) -> None:
    plan = LinearPlan(chunks_per_rank=chunks)
    assert plan.fewest_rows(op, num_ranks, num_rows, 1 << 20, torch.device("cpu")) == fewest
