"""How far the clocks of ranks are apart, from messages that go there and back."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_overlap.comm.transport import store_beside
from megatron_overlap.tracing.events import Clock, Mark

_ROUNDS = 20


def compare_clocks(group: dist.ProcessGroup, clock: Clock = time.perf_counter_ns, *, timeout_s: float = 30.0) -> Mark:
    """Where rank 0's clock stands on this rank's; every rank of `group` calls it.

    Rank 0 asks each rank in turn what its clock shows. The answer was given between question and answer, in the middle
    if both took as long. Of all rounds the fastest counts; half of it is the largest error.

    Raises:
        RuntimeError: a rank did not answer in time.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    # Of its own, and on the host: device queues and Megatron's collectives would be in the times.
    lines = dist.ProcessGroupGloo(store_beside(group), rank, size, timedelta(seconds=timeout_s))
    shown, result = torch.zeros(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
    for peer in range(1, size):
        if rank == 0:
            best = None
            for _ in range(_ROUNDS):
                start = clock()
                lines.send([shown], peer, 0).wait()
                lines.recv([shown], peer, 0).wait()
                stop = clock()
                if best is None or stop - start < 2 * best.error_ns:
                    there = int(shown[0])
                    best = Mark(there, (start + stop) // 2 - there, (stop - start + 1) // 2)
            result[:] = torch.tensor(best)
            lines.send([result], peer, 1).wait()
        elif rank == peer:
            for _ in range(_ROUNDS):
                lines.recv([shown], 0, 0).wait()
                shown[0] = clock()
                lines.send([shown], 0, 0).wait()
            lines.recv([result], 0, 1).wait()
    return Mark(*result.tolist()) if rank else Mark(clock(), 0, 0)
