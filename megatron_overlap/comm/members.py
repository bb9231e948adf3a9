"""Some ranks of a process group, for what needs no more of a group than a store and a barrier."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from megatron_overlap.comm.host_collectives import HostCollectives
from megatron_overlap.comm.transport import store_beside

_TIMEOUT_S = 600.0


class Members:
    """Consecutive ranks of `group`, or all of them. All ranks of the group make theirs at one time.

    `new_group` is not used: see `store_beside`.

    Args:
        group: the ranks that the members are among.
        members: group ranks; this rank is one of them. None takes all.

    Attributes:
        rank: this rank's number among the members.
        size: how many there are.
        ranks: their global numbers.
        store: shared by exactly them.
        group: where the members are all of it; None elsewhere.
    """

    def __init__(self, group: dist.ProcessGroup, members: Sequence[int] | None = None) -> None:
        everybody = range(dist.get_world_size(group))
        chosen = everybody if members is None else members
        self.rank, self.size = chosen.index(dist.get_rank(group)), len(chosen)
        self.ranks = [dist.get_process_group_ranks(group)[each] for each in chosen]
        self.group = group if len(chosen) == len(everybody) else None
        self.store = dist.PrefixStore(f"members/{chosen[0]}", store_beside(group))
        self._host_collectives = HostCollectives(self.store, self.rank, self.size, _TIMEOUT_S)

    def barrier(self) -> None:
        """Returns when all members are here.

        Raises:
            RuntimeError: a member did not come in time.
        """
        self._host_collectives.align()
