"""`python -m megatron_overlap.tools.doctor.gemm_rate OUT DEVICE PRECISION`: how fast GEMMs run here.

Writes `{"tflops": best, "sizes": {size: rate}}`. A process of its own, so that threads are set as in a run.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path

import torch

SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192)}
SECONDS_PER_SIZE = 0.5
MIN_REPEATS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def gemm_tflops(size: int, device: str, dtype: torch.dtype) -> float:
    """The rate of a square GEMM in TFLOP/s, from the median of its times."""
    a = torch.randn(size, size, device=device).to(dtype)
    b = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty(size, size, device=device, dtype=dtype)
    torch.mm(a, b, out=out)
    _synchronize(device)
    times: list[float] = []
    end = time.perf_counter() + SECONDS_PER_SIZE
    while len(times) < MIN_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        _synchronize(device)
        times.append(time.perf_counter() - start)
    return 2.0 * size**3 / statistics.median(times) / 1e12


def main(out: str, device: str, precision: str) -> None:
    """Measure and write."""
    rates = {size: gemm_tflops(size, device, DTYPES[precision]) for size in SIZES[device]}
    Path(out).write_text(json.dumps({"tflops": max(rates.values()), "sizes": rates}))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(*sys.argv[1:])
