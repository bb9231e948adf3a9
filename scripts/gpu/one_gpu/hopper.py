"""The Hopper kernels, in a process of their own: a fault of theirs ends it."""

from __future__ import annotations

import time
from typing import Any

import torch

from megatron_overlap.kernels.hopper_self_test import hopper_unsupported_reason, static_unsupported_reason
from one_gpu.device import device
from one_gpu.parts import Rows, correct_rows, gemm_row, overlap_row
from one_gpu.problem import Kernels
from one_gpu.shapes import shapes

PROBLEMS = [(2048, 1024, 512), (1000, 528, 336), (777, 256, 272)]


def hopper(dry: bool, deadline: float) -> Rows:
    """Their trial, then what the parts `gemm`, `overlap` and `correct` do; each row says which (`what`)."""
    reason = "nothing interprets Gluon" if dry else static_unsupported_reason()
    if reason:
        yield {"what": "trial", "left_out": reason}
        return
    reason = hopper_unsupported_reason(deadline_s=max(1.0, (deadline - time.perf_counter()) * 0.7))
    yield {"what": "trial", "failed": reason}
    if reason:
        return
    kernels, start = Kernels(device(dry), hopper=True), time.perf_counter()
    share = (deadline - start) / 3
    # The largest of what is promised come first.
    rows = (gemm_row(kernels, shape, dry) for shape in shapes(dry))
    yield from _told("gemm", rows, start + share)
    rows = (overlap_row(kernels, shape, share, 512) for share in (8, 1) for shape in shapes(dry))
    yield from _told("overlap", rows, start + 2 * share)
    yield from _told("correct", correct_rows(kernels, [torch.bfloat16, torch.float16], PROBLEMS, deadline), deadline)


def _told(what: str, rows: Any, until: float = float("inf")) -> Rows:
    """Rows as they come, until it is too late to begin another."""
    while time.perf_counter() < until and (row := next(rows, None)) is not None:
        yield {"what": what, **row}
