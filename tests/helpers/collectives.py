"""The collectives of `NcclTransport` on CPU ranks, with the latest results that the contract allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.nccl import NcclTransport
from tests.helpers.late import PoisonedPool


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
