"""Measures what predicting a linear layer needs, on the real ranks at once: GEMMs by rows, messages, collectives.

Some tens of milliseconds, once a group and type of numbers. On CUDA it waits for the device, which nothing else here
does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from megatron_overlap.autotune.predict import Costs
from megatron_overlap.comm import Transport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.transport import Transfer
from megatron_overlap.schedules import all_gather_plan

_ROWS = (8, 32, 128, 512)
_WIDTH = {"cpu": 1024, "cuda": 4096}
_SMALL, _LARGE = 4 << 10, 512 << 10
_REPEATS = 5


def probe(
    group: dist.ProcessGroup,
    transport: Transport,
    host_group: HostGroup,
    dtype: torch.dtype,
    device: torch.device,
) -> Costs:
    """The costs of the slowest rank; the same on every rank. All ranks of the group call it."""
    width = _WIDTH[device.type]
    b = torch.ones(width, width, dtype=dtype, device=device)
    times: list[float] = []
    for rows in _ROWS:
        a, out = b[:1].expand(rows, width).contiguous(), torch.empty(rows, width, dtype=dtype, device=device)
        times.append(_us(lambda a=a, out=out: torch.mm(a, b, out=out), host_group, device))  # type: ignore[misc]
    times += [_us(_message(transport, count, device), host_group, device) for count in (_SMALL, _LARGE)]
    times += [_us(_gather(group, transport.size, count, device), host_group, device) for count in (_SMALL, _LARGE)]
    slowest = [max(column) for column in zip(*host_group.all_gather_floats(times), strict=True)]
    gemms, (small, large), (few, many) = slowest[: len(_ROWS)], slowest[-4:-2], slowest[-2:]
    others = max(1, transport.size - 1)
    return Costs(
        rates={rows: 2.0 * rows * width * width / us for rows, us in zip(_ROWS, gemms, strict=True)},
        message_us=small,
        message_rate=_rate(_LARGE - _SMALL, large - small),
        collective_us=few,
        collective_rate=_rate((_LARGE - _SMALL) * others, many - few),
    )


def _rate(num_bytes: int, us: float) -> float:
    # Noise may make the larger one the faster: then it is as fast as one microsecond says.
    return num_bytes / max(us, 1.0)


def _us(run: Callable[[], object], host_group: HostGroup, device: torch.device) -> float:
    """Median time of this rank; all ranks start together."""
    times = []
    for number in range(_REPEATS + 1):
        host_group.barrier()
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if number:
            times.append((time.perf_counter() - start) * 1e6)
    return median(times)


def _message(transport: Transport, count: int, device: torch.device) -> Callable[[], None]:
    message = all_gather_plan(transport.size, transport.rank).messages[0]
    send, recv = (torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2))

    def run() -> None:
        transport.begin([Transfer(message, send, recv)], "probe").wait_all()

    return run


def _gather(group: dist.ProcessGroup, size: int, count: int, device: torch.device) -> Callable[[], None]:
    shard = torch.zeros(count, dtype=torch.uint8, device=device)
    whole = torch.empty(count * size, dtype=torch.uint8, device=device)

    def run() -> None:
        dist.all_gather_into_tensor(whole, shard, group=group)

    return run
