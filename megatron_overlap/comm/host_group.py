"""Host-side communication over gloo beside the process groups of the job: connections, small collectives, clocks."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import TransportError
from megatron_overlap.diagnostics.consistency import ranks_text, silent_ranks
from megatron_overlap.tracing import Clock, Mark

_ROUNDS = 20
"""Requests per peer of a clock comparison."""
_TURN_S = 0.1
"""Seconds that each rank adds to its deadline: rank 0 compares one after another, on two busy cores in 0.02 s each."""


def store_beside(group: dist.ProcessGroup) -> dist.Store:
    """Return a key-value store that exactly the ranks of `group` share, with keys that no earlier call used.

    Collective: every rank of `group` makes the same calls in the same order. `new_group` would deadlock (torch 2.13):
    with local synchronisation its name depends on the number of groups of a rank, which differs in Megatron's groups.
    """
    store: dist.Store = dist.distributed_c10d._get_process_group_store(group)
    # The store counts the calls of each rank, so that the count lives exactly as long as the keys that it separates.
    generation = store.add(f"megatron_overlap/generation/{dist.get_rank(group)}", 1)
    return dist.PrefixStore(f"megatron_overlap/{generation}", store)


def timeout_of(group: dist.ProcessGroup) -> float:
    """Return the timeout of a process group in seconds."""
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    timeout: Any = group._get_backend(device).options._timeout
    return float(timeout.total_seconds())


def connect_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """Return a gloo process group of `size` ranks; returns on no rank before all ranks have connected.

    gloo's own rendezvous ends on each rank separately, and a rank that closes its group at once would break the
    connection of a peer. The keys of `store` are new. `timeout_s` limits the rendezvous and each collective.

    Raises:
        RuntimeError: a rank did not connect within the deadline.
    """
    group = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_s))
    keys = [f"connected/{each}" for each in range(size)]
    store.set(keys[rank], "")
    missing = silent_ranks(store, keys, timeout_s)
    if missing:
        raise RuntimeError(f"rank {ranks_text(missing)} of the group did not connect")
    return group


def cause_of(error: Exception) -> str:
    """Return the first line of an error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


class HostGroup:
    """All ranks of a process group, or some of them, connected by gloo whatever the backend of the group is.

    Messages travel in host memory and are not ordered behind device queues or other collectives of the group. Every
    method but `close` is collective, in the same order on all ranks, from one thread at a time. It raises a
    `TransportError` where a peer is gone or the deadline has passed.

    Args:
        group: the process group. All its ranks construct their `HostGroup` at the same point of the program.
        ranks: ranks of `group` to connect, in ascending order, with this rank. None connects all.
        timeout_s: deadline of one call in seconds.
        name: purpose, for error messages.

    Attributes:
        rank, size: number of this rank among the connected ranks, and their number.
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
        """Return the integers of every rank, by rank; each rank passes equally many."""
        return [row.tolist() for row in self._all_gather(torch.tensor(values, dtype=torch.int64))]

    def all_gather_floats(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of every rank, by rank, in double precision; each rank passes equally many."""
        return [row.tolist() for row in self._all_gather(torch.tensor(values, dtype=torch.float64))]

    def all_gather_text(self, text: str) -> list[str]:
        """Return the text of every rank, by rank."""
        encoded = text.encode()
        sizes = [size for (size,) in self.all_gather([len(encoded)])]
        padded = torch.tensor(list(encoded.ljust(max(sizes), b"\0")), dtype=torch.uint8)
        rows = self._all_gather(padded)
        return [bytes(row[:size].tolist()).decode() for row, size in zip(rows, sizes, strict=True)]

    def all_to_all(self, send: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """Send `sent[r]` rows to each rank r and return `received[r]` rows of each rank; rows are in order of rank."""
        result = send.new_empty((sum(received), *send.shape[1:]))
        self._wait(self._open().alltoall_base(result, send.contiguous(), list(received), list(sent)))
        return result

    def barrier(self) -> None:
        """Return when all ranks have called it."""
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
            raise TransportError(
                f"{self._name}: rank {self.ranks[self.rank]} waited {self._timeout_s:g} s for ranks "
                f"{ranks_text(self.ranks)}: {cause_of(error)}"
            ) from error

    def _open(self) -> dist.ProcessGroupGloo:
        assert self._gloo is not None, "closed"
        return self._gloo


def compare_clocks(group: dist.ProcessGroup, clock: Clock = time.perf_counter_ns, *, timeout_s: float = 30.0) -> Mark:
    """Return the offset from this rank's clock to rank 0's clock. Collective.

    Rank 0 requests the clock of each peer several times. It assumes that the peer read its clock midway between request
    and reply. The fastest round gives the offset; half its duration bounds the error.

    Rank 0 connects with one peer at a time: a mesh of all ranks would open as many sockets on each.

    Raises:
        RuntimeError: a rank did not reply within the deadline, which `size * _TURN_S` extends.
    """
    rank, size, store = dist.get_rank(group), dist.get_world_size(group), store_beside(group)
    reading, result = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for peer in range(1, size) if rank == 0 else (rank,):
        try:
            # Apart from the groups of the job: device queues and other collectives would delay the messages.
            pair = connect_gloo(dist.PrefixStore(f"{peer}", store), int(rank > 0), 2, timeout_s + size * _TURN_S)
        except RuntimeError as error:
            raise RuntimeError(f"ranks 0 and {peer}: {cause_of(error)}") from error
        if rank == 0:
            best = None
            for _ in range(_ROUNDS):
                start = clock()
                pair.send([reading], 1, 0).wait()
                pair.recv([reading], 1, 0).wait()
                stop = clock()
                if best is None or stop - start < 2 * best.error_ns:
                    peer_ns = int(reading[0])
                    best = Mark(peer_ns, (start + stop) // 2 - peer_ns, (stop - start + 1) // 2)
            result[:] = torch.tensor(best)
            pair.send([result], 1, 1).wait()
            pair.recv([reading], 1, 2).wait()
        else:
            for _ in range(_ROUNDS):
                pair.recv([reading], 0, 0).wait()
                reading[0] = clock()
                pair.send([reading], 0, 0).wait()
            pair.recv([result], 0, 1).wait()
            pair.send([reading], 0, 2).wait()  # rank 0 may close the connection
    return Mark(*result.tolist()) if rank else Mark(clock(), 0, 0)
