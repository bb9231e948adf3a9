"""What moves the parts of a split micro-batch on GPUs, on CPU ranks: collectives, with late results, and copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.nccl import NcclTransport
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.heap import HeapPool
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.schedules.gather_scatter import Nodes
from scripts.kernels.cpu_backend import CpuBackend
from tests.helpers.late import LateTransport, PoisonedPool


class LateCollectives(NcclTransport):
    """Runs its collectives over gloo. A result holds NaN until the caller waits for it."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size, self.ranks = dist.get_rank(group), group.size(), dist.get_process_group_ranks(group)
        self.exposed_s, self._timing, self._num_p2p_works = 0.0, None, 0
        self.buffer_pool = PoisonedPool()
        self._group: Any = _LateGroup(group)

    def close(self) -> None:
        self.buffer_pool.clear()


class _LateGroup:
    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def _allgather_base(self, into: torch.Tensor, shard: torch.Tensor) -> _LateWork:
        return _LateWork(self._group._allgather_base, into, shard)

    def _reduce_scatter_base(self, into: torch.Tensor, rows: torch.Tensor) -> _LateWork:
        return _LateWork(self._group._reduce_scatter_base, into, rows)


class _LateWork:
    def __init__(
        self, start: Callable[[torch.Tensor, torch.Tensor], dist.Work], into: torch.Tensor, given: torch.Tensor
    ) -> None:
        self._into, self._hidden = into.fill_(float("nan")), torch.empty_like(into)
        self._work = start(self._hidden, given)

    def wait(self) -> None:
        self._work.wait()
        self._into.copy_(self._hidden)


class _PoisonedHeap(HeapPool):
    def take(self, *args: Any, **options: Any) -> torch.Tensor:
        return super().take(*args, **options).fill_(float("nan"))


def device_copies(ranks: HostGroup, *, on_device: bool = True) -> CopyTransport:
    """A copy transport in host memory that behaves as on a device. Its buffers hold NaN until a message arrives."""
    backend = CpuBackend(ranks)
    copies = CopyTransport(backend)
    copies.buffer_pool = copies._heap = _PoisonedHeap(backend)
    copies.copy_engines = copies.on_device = on_device
    return copies


class LateNodesTransport(CopyNodesTransport):
    """Copies between the ranks of each of `num_nodes` simulated nodes, and late messages between all ranks."""

    def __init__(self, group: dist.ProcessGroup, num_nodes: int, *, on_device: bool) -> None:
        nodes = Nodes(num_nodes, group.size() // num_nodes)
        members = HostGroup(group, nodes.members(nodes.node(dist.get_rank(group))))
        between = LateTransport(group)
        between.on_device = on_device
        super().__init__(device_copies(members, on_device=on_device), between, nodes)

    def close(self) -> None:
        """Also closes the messages between nodes, which the session closes elsewhere."""
        super().close()
        self.between.close()
