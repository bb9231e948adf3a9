"""GEMM rates of this machine, and the precision for its runs.

    python -m megatron_overlap.tools.gemm_rate OUT DEVICE PRECISION

writes the best rate of square GEMMs in TFLOP/s into OUT. It is a process of its own so that it has the threads of a
run. Without arguments it prints the default precision of this machine. On processors without bf16 instructions, PyTorch
computes bf16 GEMMs with scalar loops. On an EPYC with AVX2 they reach 0.8 GFLOP/s, fp32 GEMMs 46 GFLOP/s.
"""

import statistics
import sys
import time
from pathlib import Path

import torch

SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_SLOW_FACTOR = 4.0  # a precision whose GEMMs are slower than those of fp32 by it has no instructions on this processor


def _times(rows: int, columns: int, device: str, dtype: torch.dtype, repeats: int, seconds: float) -> list[float]:
    """The times of a GEMM in seconds: at least `repeats`, for `seconds`, after a first."""
    a, b = (torch.randn(size, columns, device=device).to(dtype) for size in (rows, columns))
    out = torch.empty_like(a)

    def multiply() -> float:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    multiply()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < repeats or time.perf_counter() < end:
        times.append(multiply())
    return times


def gemm_tflops(size: int, device: str, dtype: torch.dtype) -> float:
    """The rate of a square GEMM in TFLOP/s."""
    return 2.0 * size**3 / statistics.median(_times(size, size, device, dtype, repeats=3, seconds=0.5)) / 1e12


def small_gemm_gflops(precision: str) -> float:
    """The best rate of a small GEMM on the processor in GFLOP/s: other programs may take the processor away."""
    return 2.0 * 64 * 512**2 / min(_times(64, 512, "cpu", DTYPES[precision], repeats=5, seconds=0.0)) / 1e9


def slow_precision_reason(precision: str) -> str | None:
    """Why runs on this processor should not use a precision; None if they can."""
    rate, fp32 = small_gemm_gflops(precision), small_gemm_gflops("fp32")
    if rate * _SLOW_FACTOR > fp32:
        return None
    return (
        f"{precision} GEMMs run at {rate:.1f} GFLOP/s on this processor, fp32 at {fp32:.0f}: it has no instructions "
        f"for {precision}; use fp32 (train.precision=fp32)"
    )


def default_precision() -> str:
    """Bf16; fp32 on a machine without a GPU whose processor has no bf16 instructions."""
    return "bf16" if torch.cuda.is_available() or slow_precision_reason("bf16") is None else "fp32"


if __name__ == "__main__":
    if len(sys.argv) == 1:
        print(default_precision())
    else:
        out, device, precision = sys.argv[1:]
        Path(out).write_text(str(max(gemm_tflops(size, device, DTYPES[precision]) for size in SIZES[device])))
