"""Worker function: balanced attention over copies on the host, beside messages over gloo in fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.transport import OrderedTransport, Transport
from megatron_overlap.ops import balanced_attention
from tests.helpers.collectives import device_copies
from tests.ops.varlen import attention_workers as workers
from tests.ops.varlen.attention_workers import Batch, Case


@dataclass(frozen=True)
class Found:
    """What one rank found.

    Attributes:
        different: numbers of the calls whose results have other bits than over gloo.
        maps: symmetric buffers that were mapped in each call.
    """

    different: list[int]
    maps: list[int]


def run(case: Case, index: int, batch: Batch, transport: Transport) -> Batch:
    """Output and gradients of one call, of pass `index`."""
    return workers.run(
        balanced_attention,
        batch,
        case.plan,
        index=index,
        group=transport,
        passing=case.passing,
        layout=case.layout,
    )


def compare(group: dist.ProcessGroup, cases: Sequence[Case], dtype: torch.dtype, *, on_device: bool) -> Found:
    """Run the cases one after another, each of them twice as two layers do, forward and backward.

    The buffers of copies hold NaN until a message arrives. `on_device` selects the order of the tasks on a device.
    """
    copies, messages = device_copies(HostGroup(group), on_device=on_device), OrderedTransport(GlooTransport(group))
    backend, different, maps = copies.backend, list[int](), list[int]()
    for number, case in enumerate(cases):
        before = backend._num_maps  # type: ignore[attr-defined]
        for index, layer in product(range(len(case.plan.passes)), range(2)):
            batch = [tensor.to(dtype) for tensor in workers.make_batch(group, case, index, 2 * number + layer)]
            got, expected = run(case, index, batch, copies), run(case, index, batch, messages)
            if not all(map(torch.equal, got, expected)):
                different.append(number)
        maps.append(backend._num_maps - before)  # type: ignore[attr-defined]
    dist.barrier(group)
    copies.close()
    messages.close()
    return Found(different, maps)
