"""How long something takes on all ranks of a group, in microseconds: the same figure on every rank."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

_REPEATS, _LEAST_REPEATS, _ENOUGH_S = 9, 4, 0.25
_TOGETHER = 11
_APART_US = 1e3
_HICCUP = 2.0


def alone_us(run: Callable[[], object], group: dist.ProcessGroup, before: Callable[[], object] = lambda: None) -> float:
    """Mean time of all ranks that compute, in microseconds; `before` is run each time and not counted.

    A step is a sum of many such: their mean counts, not their median. Whatever took more than twice the median is left
    out: so few times say nothing of how often that happens. The ranks begin together once: what a barrier leaves to its
    threads would be in every figure.
    """
    dist.barrier(group)
    times: list[float] = []
    begin = time.perf_counter()
    for number in range(_REPEATS + 2):
        if len(times) >= _LEAST_REPEATS and time.perf_counter() - begin > _ENOUGH_S:
            break
        before()
        start = time.perf_counter()
        run()
        if number >= 2:
            times.append((time.perf_counter() - start) * 1e6)
    middle = statistics.median(times)
    return mean_over_ranks(statistics.fmean(each for each in times if each <= _HICCUP * middle), group)


def together_us(run: Callable[[], object], group: dist.ProcessGroup) -> float:
    """Time of something that ranks do together, in microseconds: the lower quartile.

    Where a thread had to wait for a core is what lateness says, which is measured by itself.
    """
    return statistics.quantiles([once_us(run, group) for _ in range(_TOGETHER + 2)][2:], n=4)[0]


def apart_us(run: Callable[[], object], group: dist.ProcessGroup) -> float:
    """As `together_us`, of ranks that do not begin together, as in a step: the one that begins last, each in turn. The
    median.

    Two ranks of gloo tell each other that they can receive over the connection that takes their data. Who begins last
    has its data before its word there, the other one's data waits for that, and an all-gather takes half as long again.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    times = []
    for number in range(_TOGETHER + 2):
        last = number % size == rank
        dist.barrier(group)
        start = time.perf_counter()
        while last and (time.perf_counter() - start) * 1e6 < _APART_US:
            pass
        run()
        took = (time.perf_counter() - start) * 1e6 - _APART_US
        # The mean over all ranks of what only one of them adds to: that one's time.
        times.append(mean_over_ranks(size * took if last else 0.0, group))
    return statistics.median(times[2:])


def once_us(run: Callable[[], object], group: dist.ProcessGroup) -> float:
    """The mean over ranks of what something takes once, in microseconds; all begin together."""
    dist.barrier(group)
    start = time.perf_counter()
    run()
    return mean_over_ranks((time.perf_counter() - start) * 1e6, group)


def mean_over_ranks(us: float, group: dist.ProcessGroup) -> float:
    """The mean over ranks: the same figure on all of them."""
    total = torch.tensor(us, dtype=torch.float64)
    dist.all_reduce(total, group=group)
    return float(total.item()) / dist.get_world_size(group)
