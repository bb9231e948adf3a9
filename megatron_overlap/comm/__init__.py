"""Moves bytes between the ranks of a group. Knows no maths."""

from megatron_overlap.comm.buffers import Workspace
from megatron_overlap.comm.transport import (
    Flight,
    Transport,
    TransportError,
    close_transport,
    transport_of,
)

__all__ = ["Flight", "Transport", "TransportError", "Workspace", "close_transport", "transport_of"]
