"""Host-side collectives over gloo: exchange small numbers, strings and rows between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron_overlap.comm.connection import connect_gloo, store_beside
from megatron_overlap.comm.transport import TransportError


class HostGroup:
    """All ranks of a process group, or some of them, connected by gloo whatever the backend of the group is.

    Messages travel in host memory and are not ordered behind device queues or other collectives of the group. Every
    method but `close` is collective: all ranks call the same methods in the same order, from one thread at a time.

    Args:
        group: the process group. All its ranks construct their `HostGroup` at the same point of the program.
        ranks: ranks of `group` to connect, in ascending order; this rank is one of them. None connects all.
        timeout_s: deadline of one call in seconds.
        name: names the purpose in error messages.

    Attributes:
        rank: number of this rank among the connected ranks.
        size: number of connected ranks.
        ranks: global numbers of the connected ranks.
        store: key-value store that exactly the connected ranks share.
        group: the process group if all its ranks are connected, else None.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Sequence[int] | None = None,
        *,
        timeout_s: float = 600.0,
        name: str = "host group",
    ) -> None:
        chosen = range(dist.get_world_size(group)) if ranks is None else ranks
        self.rank, self.size = chosen.index(dist.get_rank(group)), len(chosen)
        self.ranks = [dist.get_process_group_ranks(group)[rank] for rank in chosen]
        self.group = group if len(chosen) == dist.get_world_size(group) else None
        self.store = dist.PrefixStore(f"host group/{chosen[0]}", store_beside(group))
        self._timeout_s, self._name = timeout_s, name
        self._gloo: dist.ProcessGroupGloo | None = connect_gloo(self.store, self.rank, self.size, timeout_s)

    def all_gather(self, values: Sequence[int]) -> list[list[int]]:
        """Return the integers of every rank, by rank; each rank passes equally many.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        return [row.tolist() for row in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def all_gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank, in double precision; each rank passes equally many.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        return [row.tolist() for row in self._all_gather(torch.tensor(values, dtype=torch.float64))]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of every rank, by rank.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        encoded = text.encode()
        sizes = [size for (size,) in self.all_gather([len(encoded)])]
        padded = torch.tensor(list(encoded.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        rows = self._all_gather(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def all_to_all(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send rows to every rank and return the rows of every rank, ordered by rank.

        Args:
            send: rows on the CPU, those for rank 0 first.
            sent: number of rows for each rank.
            received: number of rows from each rank.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        result = send.new_empty((sum(received), *send.shape[1:]))
        self._wait(self._open().alltoall_base(result, send.contiguous(), list(received), list(sent)))
        return result

    def barrier(self) -> None:
        """Return when all ranks have called.

        Raises:
            TransportError: a peer is gone, or the deadline has passed.
        """
        self._wait(self._open().barrier())

    def close(self) -> None:
        """Close the connections. Peers that wait for this rank get an error."""
        self._gloo = None

    def _all_gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        if values.numel():
            self._wait(self._open().allgather([gathered], [values]))
        return gathered

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            cause = str(error).strip().splitlines() or [type(error).__name__]
            raise TransportError(
                f"{self._name}: rank {self.ranks[self.rank]} waited {self._timeout_s:g} s for ranks "
                f"{', '.join(map(str, self.ranks))}: {cause[0]}"
            ) from error

    def _open(self) -> dist.ProcessGroupGloo:
        assert self._gloo is not None, "closed"
        return self._gloo
