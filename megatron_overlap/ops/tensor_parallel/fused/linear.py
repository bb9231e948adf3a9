"""Method `fused`: linear layers whose GEMM kernels communicate over symmetric memory.

- All-gather: copy engines move the rows; each tile of the GEMM waits for its rows.
- Reduce-scatter: the GEMM stores its tiles in the memory of their owners; the owners add them.
- All-reduce: that reduce-scatter, then an all-gather of the sums.

Over several nodes kernels communicate inside a node, and messages pass between nodes (`ops.tensor_parallel.nodes`).

Source: Flux (arXiv 2406.06858) for the forward pass. Flux has no backward pass. Not yet run on several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.cuda import CudaBackend, probe_symmetric_memory
from megatron_overlap.comm.symmetric.nodes import NodesTransport
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.ops.call import InputVersion
from megatron_overlap.ops.tensor_parallel.fused.intra_node import IntraNodeGather, IntraNodeScatter
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.tensor_parallel.method import LinearMethod
from megatron_overlap.ops.tensor_parallel.nodes import NodesGather, NodesScatter
from megatron_overlap.ops.wgrad import Piece
from megatron_overlap.schedules.gather_scatter import Nodes


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


_DEFAULT_PLAN = FusedPlan()


def unsupported_fused_reason(x: torch.Tensor, num_rows: int, num_ranks: int) -> str | None:
    """Return why one call cannot use the fused kernels; None if it can."""
    if x.device.type != "cuda":
        return f"fused kernels need CUDA, not {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"fused kernels compute in bf16 and fp16, not {x.dtype}"
    if num_rows < num_ranks:
        return f"{num_rows} rows are fewer than {num_ranks} ranks"
    return None


class FusedMethod(LinearMethod):
    """Fused kernels over symmetric memory. Pass it as `group` of a linear layer.

    Args:
        transport: of the group.
        plan: how bytes are moved and tiles computed; the same on every rank. None uses `FusedPlan()`.
    """

    def __init__(self, transport: FusedTransport, plan: FusedPlan | None = None) -> None:
        self.transport, self.plan = transport, plan or _DEFAULT_PLAN
        self.rank, self.size, self.buffer_pool = transport.rank, transport.size, transport.buffer_pool

    def gather(
        self, shard: torch.Tensor, num_rows: int, op: str, *, version: InputVersion | None = None, save: bool = False
    ) -> IntraNodeGather | NodesGather:
        assert not save
        if isinstance(self.transport, FusedNodesTransport):
            return NodesGather(*self._over_nodes(self.transport), shard, num_rows, op)
        return IntraNodeGather(self.transport, shard, num_rows, op, self.plan)

    def scatter(
        self, a: torch.Tensor, b: torch.Tensor, op: str, meanwhile: Callable[[], bool] | None = None
    ) -> IntraNodeScatter | NodesScatter:
        if isinstance(self.transport, FusedNodesTransport):
            return NodesScatter(*self._over_nodes(self.transport), a, b, op)
        return IntraNodeScatter(self.transport, a, b, op, self.plan)

    def _over_nodes(self, transport: FusedNodesTransport) -> tuple[FusedMethod, Transport, Nodes]:
        return FusedMethod(transport.inside, self.plan), transport.between, transport.nodes

    def all_reduce(self, a: torch.Tensor, b: torch.Tensor, op: str, *, work_follows: bool = False) -> FusedAllReduce:
        return FusedAllReduce(self, a, b, op)


class FusedAllReduce:
    """A fused GEMM + reduce-scatter and an all-gather of the sums; see `AllReduce`."""

    def __init__(self, method: FusedMethod, a: torch.Tensor, b: torch.Tensor, op: str) -> None:
        own = method.scatter(a, b, op).finish()
        self._gather = method.gather(own, a.shape[0], op)
        self._out = self._gather.rows()
        own_rows = -(-a.shape[0] // method.size)
        num_rows = a.shape[0] - own_rows + (method.size - 1) * own_rows
        self.num_bytes = num_rows * b.shape[1] * a.itemsize
        """Bytes that this rank sends: the partial sums of other owners, and the own sums to all other ranks."""

    def run_beside(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            piece()

    def finish(self) -> torch.Tensor:
        self._gather.finish()
        return self._out
