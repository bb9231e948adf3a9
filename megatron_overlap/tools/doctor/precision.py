"""`python -m megatron_overlap.tools.doctor.precision`: prints the type that runs on this machine should compute in.

PyTorch computes bf16 on processors without instructions for it too, with plain loops: a run takes a hundred times as
long and says nothing. Seen on an EPYC whose virtual machine shows AVX2 only: .8 GFLOP/s where fp32 has 46.
"""

from __future__ import annotations

import statistics
import time

import torch

from megatron_overlap.tools.doctor.gemm_rate import DTYPES

_SHAPE = (64, 512, 512)
_REPEATS = 5
_MUCH_SLOWER = 4.0


def gemm_gflops(precision: str) -> float:
    """The processor's rate of a small GEMM, from the median of its times."""
    rows, columns, depth = _SHAPE
    a, b = (torch.randn(*of).to(DTYPES[precision]) for of in ((rows, depth), (depth, columns)))
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        torch.mm(a, b)
        times.append(time.perf_counter() - start)
    return 2.0 * rows * columns * depth / statistics.median(times[1:]) / 1e9


def objection(precision: str) -> str | None:
    """Why nothing should be computed in this type on this machine's processor; None: nothing speaks against it."""
    if precision == "fp32":
        return None
    rate, fp32 = gemm_gflops(precision), gemm_gflops("fp32")
    if rate * _MUCH_SLOWER > fp32:
        return None
    return (
        f"{precision} GEMMs run at {rate:.1f} GFLOP/s on this processor, fp32 at {fp32:.0f}: it has no instructions "
        f"for {precision}; use fp32 (train.precision=fp32)"
    )


def usual_precision() -> str:
    """Bf16, as models are trained; fp32 on a machine without GPU whose processor cannot do that."""
    return "bf16" if torch.cuda.is_available() or objection("bf16") is None else "fp32"


if __name__ == "__main__":
    print(usual_precision())
