"""Whether the GEMMs of this processor round a row the same in a GEMM of fewer rows."""

from __future__ import annotations

from functools import cache

import torch

from megatron_overlap.ops.expert_parallel.experts import _EXACT_ROWS


@cache
def rows_round_alike() -> bool:
    """Whether a GEMM of four or more rows gives each row the same bits as a GEMM of more rows.

    True on an AMD EPYC, false on an Intel Xeon with AVX-512 and AMX, whose libraries select kernels by the rows.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for dtype, features in ((torch.float32, 96), (torch.bfloat16, 2048)):
            a, weight = torch.randn(64, features).to(dtype), torch.randn(features // 2, features).to(dtype)
            whole = torch.mm(a, weight.t())
            if any(not torch.equal(torch.mm(a[:rows], weight.t()), whole[:rows]) for rows in range(_EXACT_ROWS, 64)):
                return False
    finally:
        torch.set_num_threads(threads)
    return True


def bound() -> float:
    """Largest relative deviation of an fp32 layer whose rows are computed in several GEMMs."""
    return 0.0 if rows_round_alike() else 2e-6
