"""Connects the ranks of a group for one more communicator: the store that they share, and a gloo group over it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def store_beside(group: dist.ProcessGroup) -> dist.Store:
    """Return a key-value store that exactly the ranks of `group` share, with keys that no earlier call used.

    Collective: every rank of `group` makes the same calls in the same order. `new_group` is no alternative. It needs
    every rank of the job or, with local synchronisation, derives its name from the number of groups that a rank is in.
    That number differs between the ranks of Megatron's groups, and they deadlock (torch 2.13).
    """
    store: dist.Store = dist.distributed_c10d._get_process_group_store(group)
    # The store counts the calls of each rank, so that the count lives exactly as long as the keys that it separates.
    generation = store.add(f"megatron_overlap/generation/{dist.get_rank(group)}", 1)
    return dist.PrefixStore(f"megatron_overlap/{generation}", store)


def connect_gloo(store: dist.Store, rank: int, size: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """Return a gloo process group of `size` ranks; returns on no rank before all ranks have connected.

    gloo's own rendezvous ends on each rank separately. A rank that closes its group at once would break the connection
    of a peer that still connects.

    Args:
        store: shared by exactly these ranks; its keys are new.
        rank: this rank.
        size: number of ranks.
        timeout_s: deadline of the rendezvous and of each collective, in seconds.

    Raises:
        RuntimeError: a rank did not connect within the deadline.
    """
    timeout = timedelta(seconds=timeout_s)
    group = dist.ProcessGroupGloo(store, rank, size, timeout)
    keys = [f"connected/{each}" for each in range(size)]
    store.set(keys[rank], "")
    _wait(store, keys, timeout)
    return group


def _wait(store: dist.Store, keys: Sequence[str], timeout: timedelta) -> None:
    try:
        store.wait(list(keys), timeout)
    except (RuntimeError, TimeoutError) as error:
        missing = ", ".join(str(rank) for rank, key in enumerate(keys) if not store.check([key]))
        if missing:
            raise RuntimeError(f"rank {missing} of the group did not connect") from error
