"""Fused ops on a machine without a GPU: memory that processes share, kernels in the interpreter."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.cpu import HostFabric
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.ops.tensor_parallel.fused.multi_node import NodesTransport
from megatron_overlap.schedules.hierarchical import Nodes
from tests.helpers.late import LateTransport


class PoisonedFabric(HostFabric):
    """Memory starts as NaN of every type: what nobody wrote shows in the result."""

    def map(self, num_bytes: int) -> list[torch.Tensor]:
        arenas = super().map(num_bytes)
        arenas[self.rank].fill_(255)
        return arenas


def fused_transport(group: dist.ProcessGroup, hosts: int = 1) -> Any:
    """A transport of this process's group, as if it were on `hosts` hosts; its ops interpret their kernels.

    Messages between hosts are as late as they may be.
    """
    from megatron_overlap.kernels.wait import wait_all

    if hosts == 1:
        return SymmetricTransport(PoisonedFabric(HostGroup(group)), wait_all)
    nodes = Nodes(hosts, dist.get_world_size(group) // hosts)
    members = HostGroup(group, nodes.members(nodes.node(dist.get_rank(group))))
    return _WholeNodes(SymmetricTransport(PoisonedFabric(members), wait_all), LateTransport(group), nodes)


class _WholeNodes(NodesTransport):
    """Owns the messages' transport too."""

    def close(self) -> None:
        super().close()
        self.between.close()
