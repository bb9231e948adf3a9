"""Fused operations without a GPU: memory shared by processes, kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.nodes import NodesTransport
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.schedules.gather_scatter import Nodes
from scripts.kernels.cpu_backend import CpuBackend
from tests.helpers.late import LateTransport


class PoisonedBackend(CpuBackend):
    """Fills new memory with NaN of every dtype: a read of unwritten memory changes the result."""

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        arenas = super().map(num_bytes, name)
        arenas[self.rank].fill_(255)
        return arenas


def fused_transport(group: dist.ProcessGroup, hosts: int = 1) -> Any:
    """Return a transport of `group` that simulates `hosts` hosts; its kernels run in the interpreter.

    Messages between hosts arrive as late as the contract allows.
    """
    from megatron_overlap.kernels.primitives import wait_all

    if hosts == 1:
        return SymmetricTransport(PoisonedBackend(HostGroup(group)), wait_all)
    nodes = Nodes(hosts, dist.get_world_size(group) // hosts)
    members = HostGroup(group, nodes.members(nodes.node(dist.get_rank(group))))
    return _OwningNodesTransport(SymmetricTransport(PoisonedBackend(members), wait_all), LateTransport(group), nodes)


class _OwningNodesTransport(NodesTransport[SymmetricTransport]):
    """Also closes the transport of messages between nodes."""

    def close(self) -> None:
        super().close()
        self.between.close()
