"""Opens, finds and closes the transports of process groups."""

from collections.abc import Iterator, Mapping

import torch.distributed as dist

from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.nccl import NcclTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.comm.transport import DEFAULT_OPTIONS, OrderedTransport, Transport, TransportOptions
from megatron_overlap.diagnostics.consistency import ranks_text

CHANNELS: Mapping[str, str] = {
    "": "layers of tensor parallelism, Ulysses, experts and rings of varlen attention",
    "copies": "the same and gradients, by copy engines",
    "data": "gradient reduce-scatter and parameter all-gather",
    "data sums": "all-gather of summed gradients",
    "intra": "rings of varlen attention inside a node, on NCCL",
    "rebalance": "rows moved between attention and linear layout, on NCCL",
    "part a": "layers of tensor parallelism, first part of a split micro-batch",
    "part b": "layers of tensor parallelism, second part of a split micro-batch",
}
"""Channels of the package and what each carries. Operations of one channel begin in the same order on all ranks."""

PART_CHANNELS = "part a", "part b"
"""The channels of the parts of a split micro-batch. In one channel a message that is not yet sent would delay those of
the other part."""


class Transports:
    """Owner of the open transports: at most one for each process group and channel. Channels may have the same one."""

    def __init__(self) -> None:
        self._open: dict[dist.ProcessGroup, dict[str, Transport]] = {}

    def find(self, group: dist.ProcessGroup, channel: str = "") -> Transport | None:
        """Return the open transport of a group and channel, or None."""
        return self._open.get(group, {}).get(channel)

    def open(self, group: dist.ProcessGroup, options: TransportOptions = DEFAULT_OPTIONS) -> Transport:
        """Return the transport of `group` and `options.channel`. The first call is collective and opens it.

        Messages use a separate communicator, so that they are never ordered behind Megatron's collectives.

        Raises:
            TransportError: a rank did not connect within the deadline, or this torch cannot register buffers.
            ValueError: the channel is not declared, or the backend of the group is neither gloo nor NCCL.
        """
        transport = self.find(group, options.channel)
        if transport is None:
            if options.channel not in CHANNELS:
                known = ", ".join(map(repr, CHANNELS))
                raise ValueError(
                    f"channel: {options.channel!r}: not declared: use one of {known}, or add it to CHANNELS"
                )
            transport = _open(group, options)
            self.insert(group, transport, options.channel)
        return transport

    def insert(self, group: dist.ProcessGroup, transport: Transport, channel: str = "") -> None:
        """Register an open transport, which `open` then returns."""
        self._open.setdefault(group, {})[channel] = transport

    def close(self, group: dist.ProcessGroup | None = None) -> None:
        """Close the transports of `group` in all channels; None closes the transports of all groups."""
        for each in list(self._open) if group is None else [group]:
            for transport in dict.fromkeys(self._open.pop(each, {}).values()):
                transport.close()

    def free_replaced(self) -> None:
        """Free the symmetric buffers that larger ones have replaced. Call it between training steps."""
        for channels in self._open.values():
            for transport in channels.values():
                inside = transport.inside if isinstance(transport, CopyNodesTransport) else transport
                inside.buffer_pool.free_replaced()

    def buffers(self) -> Iterator[tuple[str, dict[str, int]]]:
        """Iterate over the open transports: channel and ranks in words, and bytes by buffer."""
        for group, channels in self._open.items():
            ranks = f"ranks {ranks_text(dist.get_process_group_ranks(group))}"
            names = {transport: channel for channel, transport in reversed(channels.items())}
            for transport, channel in reversed(names.items()):
                yield f"{channel} of {ranks}" if channel else ranks, transport.buffer_pool.sizes()


def _open(group: dist.ProcessGroup, options: TransportOptions) -> Transport:
    backend = dist.get_backend(group)
    if backend == "gloo":
        transport: Transport = GlooTransport(group, options)
    elif backend == "nccl":
        transport = NcclTransport(group, options)
    else:
        raise ValueError(f"group: backend {backend}: overlap needs gloo or nccl")
    return OrderedTransport(transport) if options.ordered else transport


_WITHOUT_SESSION = Transports()
"""Owner of the transports of operations that run without a session; `close_transport` closes them."""


def transport_of(group: dist.ProcessGroup, channel: str = "") -> Transport:
    """Return the transport of `group` for use without a session; the first call opens it and is collective."""
    return _WITHOUT_SESSION.find(group, channel) or _WITHOUT_SESSION.open(group, TransportOptions(channel=channel))


def close_transport(group: dist.ProcessGroup) -> None:
    """Close what `transport_of` opened for `group`, in all channels."""
    _WITHOUT_SESSION.close(group)


def destroy_process_groups() -> None:
    """Close what `transport_of` opened and destroy all process groups; collective. A rank program ends with it.

    A thread of gloo releases the tensors of a collective after it has returned, and aborts the process if the
    interpreter ends first. A destroyed group joins its threads, but only if no transport refers to it.
    """
    dist.barrier()
    _WITHOUT_SESSION.close()
    dist.destroy_process_group()
