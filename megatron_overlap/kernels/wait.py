"""A kernel of one block that blocks its stream until all flags reach an epoch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron_overlap.kernels import primitives
from megatron_overlap.kernels.launch import MAX_POLLS


def plain(flags: list[int], epoch: int) -> bool:
    """Whether the kernel can end."""
    return all(flag >= epoch for flag in flags)


@triton.jit
def wait_all_kernel(flags_ptr, epoch, status_ptr, num_flags, MAX_POLLS: tl.constexpr):
    for number in tl.range(0, num_flags):
        primitives.wait_for(flags_ptr + number, epoch, status_ptr, MAX_POLLS)


def wait_all(flags: torch.Tensor, epoch: int, status: torch.Tensor, max_polls: int = MAX_POLLS) -> None:
    """Enqueue the wait on the current stream; see `plain`. The flags must not depend on this stream."""
    wait_all_kernel[(1,)](flags, epoch, status, flags.numel(), MAX_POLLS=max_polls, num_warps=1)
