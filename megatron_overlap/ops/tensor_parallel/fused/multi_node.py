"""Fused operations over several nodes: kernels inside a node, messages between nodes (`ops.tensor_parallel.nodes`)."""

from collections.abc import Callable

import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.cuda import CudaBackend, probe_symmetric_memory
from megatron_overlap.comm.symmetric.nodes import NodesTransport
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.comm.transport import Transport


class FusedNodesTransport(NodesTransport[SymmetricTransport]):
    """Symmetric memory of the ranks of this node, and messages between all ranks of the group."""

    @property
    def num_bytes(self) -> int:
        """See `SymmetricTransport.num_bytes`."""
        return self.inside.num_bytes

    @property
    def bound_bytes(self) -> int:
        """See `SymmetricTransport.bound_bytes`; counts the rows of one node, not of the whole group."""
        return self.inside.bound_bytes


FusedTransport = SymmetricTransport | FusedNodesTransport


def inside_host(transport: FusedTransport) -> SymmetricTransport:
    """Return the symmetric memory that fused operations use inside a node."""
    return transport.inside if isinstance(transport, FusedNodesTransport) else transport


def open_fused(group: dist.ProcessGroup, messages: Callable[[dist.ProcessGroup], Transport]) -> FusedTransport | str:
    """Open the transport of fused operations between the ranks of `group`. Collective.

    Args:
        group: ranks with a CUDA device each.
        messages: opens the transport between nodes; called only if the group spans several nodes.

    Returns:
        The transport, or why the group cannot have one. All ranks return the same reason.
    """
    nodes = probe_symmetric_memory(group)
    if isinstance(nodes, str):
        return nodes
    from megatron_overlap.kernels.primitives import wait_all

    host_group = HostGroup(group, nodes.members(nodes.node(dist.get_rank(group))))
    inside = SymmetricTransport(CudaBackend(host_group), wait_all)
    return inside if nodes.num_nodes == 1 else FusedNodesTransport(inside, messages(group), nodes)
