"""Moves bytes between the ranks of a group. Computes nothing."""

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.registry import (
    PART_CHANNELS,
    Transports,
    close_transport,
    destroy_process_groups,
    transport_of,
)
from megatron_overlap.comm.transport import P2PWork, Transport, TransportError, TransportOptions

__all__ = [
    "PART_CHANNELS",
    "BufferPool",
    "P2PWork",
    "Transport",
    "TransportError",
    "TransportOptions",
    "Transports",
    "close_transport",
    "destroy_process_groups",
    "transport_of",
]
