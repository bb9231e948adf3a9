"""Measures the offset between the clocks of ranks from request and reply messages."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from megatron_overlap.comm.connection import connect_gloo, store_beside
from megatron_overlap.tracing.events import Clock, Mark

_ROUNDS = 20


def compare_clocks(group: dist.ProcessGroup, clock: Clock = time.perf_counter_ns, *, timeout_s: float = 30.0) -> Mark:
    """Return the offset from this rank's clock to rank 0's clock. Collective.

    Rank 0 requests the clock of each peer several times. It assumes that the peer read its clock midway between request
    and reply. The fastest round gives the offset; half its duration bounds the error.

    Raises:
        RuntimeError: a rank did not reply within the deadline.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # A separate group on the host: device queues and other collectives would delay the messages.
    gloo = connect_gloo(store_beside(group), rank, size, timeout_s)
    reading, result = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for peer in range(1, size):
        if rank == 0:
            best = None
            for _ in range(_ROUNDS):
                start = clock()
                gloo.send([reading], peer, 0).wait()
                gloo.recv([reading], peer, 0).wait()
                stop = clock()
                if best is None or stop - start < 2 * best.error_ns:
                    peer_ns = int(reading[0])
                    best = Mark(peer_ns, (start + stop) // 2 - peer_ns, (stop - start + 1) // 2)
            result[:] = torch.tensor(best)
            gloo.send([result], peer, 1).wait()
        elif rank == peer:
            for _ in range(_ROUNDS):
                gloo.recv([reading], 0, 0).wait()
                reading[0] = clock()
                gloo.send([reading], 0, 0).wait()
            gloo.recv([result], 0, 1).wait()
    return Mark(*result.tolist()) if rank else Mark(clock(), 0, 0)
