"""Moves bytes between the ranks of a group. Knows no maths."""

from megatron_overlap.comm.buffers import BufferPool
from megatron_overlap.comm.transport import (
    P2PWork,
    Transport,
    TransportError,
    close_transport,
    transport_of,
)

__all__ = ["P2PWork", "Transport", "TransportError", "BufferPool", "close_transport", "transport_of"]
