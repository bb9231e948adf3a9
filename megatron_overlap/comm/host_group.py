"""Messages of a data loader: small, in host memory, on a thread of their own beside the training's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError, store_beside


class HostGroup:
    """The ranks of a group, talking over gloo whatever the group's own backend is.

    Nothing here is ordered behind the training's messages. All ranks of the group make the same calls in the same
    order, from one thread at a time.

    Args:
        group: whose ranks talk. All of them make their `HostGroup` before the first call.
        timeout_s: deadline of one call in seconds.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float = 600.0) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._ranks, self._timeout_s = dist.get_process_group_ranks(group), timeout_s
        self._group: dist.ProcessGroupGloo | None = dist.ProcessGroupGloo(
            store_beside(group), self.rank, self.size, timedelta(seconds=timeout_s)
        )

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Everybody's numbers, by rank; as many from each.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        mine = torch.tensor(values, dtype=torch.int64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(self._open().allgather([found], [mine]))
        return [tensor.tolist() for tensor in found]

    def all_to_all(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Rows for every rank in turn against rows from every rank in turn.

        Args:
            send: rows on the CPU, those for rank 0 first.
            sent: rows for each rank.
            received: rows from each rank.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        result = send.new_empty((sum(received), *send.shape[1:]))
        self._wait(self._open().alltoall_base(result, send.contiguous(), list(received), list(sent)))
        return result

    def close(self) -> None:
        """Closes the connections: peers that wait for this rank get an error."""
        self._group = None

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            mine, all_ranks = self._ranks[self.rank], ", ".join(map(str, self._ranks))
            raise TransportError(
                f"data loader: rank {mine} waited in vain for ranks {all_ranks} for {self._timeout_s:g} s: {cause[0]}"
            ) from error

    def _open(self) -> dist.ProcessGroupGloo:
        assert self._group is not None, "closed"
        return self._group
