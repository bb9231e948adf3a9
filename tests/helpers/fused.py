"""Fused ops on a machine without a GPU: memory that processes share, kernels in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_fabric import HostFabric
from megatron_overlap.comm.symmetric import SymmetricTransport


class PoisonedFabric(HostFabric):
    """Memory starts as NaN of every type: what nobody wrote shows in the result."""

    def map(self, num_bytes: int) -> list[torch.Tensor]:
        arenas = super().map(num_bytes)
        arenas[self.rank].fill_(255)
        return arenas


def fused_transport(group: dist.ProcessGroup) -> SymmetricTransport:
    """A transport of this process's group; its ops interpret their kernels."""
    from megatron_overlap.kernels.wait import wait_all

    return SymmetricTransport(PoisonedFabric(group), wait_all)


def fused_op(name: str) -> Callable[..., Any]:
    """The fused op that equals `ops.<name>`."""
    from megatron_overlap.ops import fused, fused_all_reduce

    home = fused if hasattr(fused, f"fused_{name}") else fused_all_reduce
    op: Callable[..., Any] = getattr(home, f"fused_{name}")
    return op
