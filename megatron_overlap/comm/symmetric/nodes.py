"""Groups that span several nodes: memory that the ranks of a node share, and messages between all ranks."""

from collections.abc import Sequence

from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.comm.transport import Collectives, P2PWork, Transfer, Transport
from megatron_overlap.schedules.gather_scatter import Nodes


class NodesTransport[Inside: CopyTransport | SymmetricTransport]:
    """Both transports of a group, for operations that use each where it is faster.

    Args:
        inside: between the ranks of this node.
        between: between all ranks; the caller closes it.
        nodes: placement of the ranks.
    """

    def __init__(self, inside: Inside, between: Transport, nodes: Nodes) -> None:
        self.inside, self.between, self.nodes = inside, between, nodes
        self.rank, self.size, self.buffer_pool = between.rank, between.size, between.buffer_pool
        self.close = inside.close  # frees the memory that the ranks of the node share


class CopyNodesTransport(NodesTransport[CopyTransport]):
    """See `Transport`. Copies inside a node, messages between nodes (`ops.tensor_parallel.nodes`).

    An operation that calls `begin` itself sends messages to all ranks.
    """

    copy_engines = capturable = prepares = False

    def __init__(self, inside: CopyTransport, between: Transport, nodes: Nodes) -> None:
        super().__init__(inside, between, nodes)
        self.on_device = between.on_device

    @property
    def exposed_s(self) -> float:
        return self.between.exposed_s

    @property
    def collectives(self) -> Collectives | None:
        return self.between.collectives

    def begin(self, transfers: Sequence[Transfer], op: str) -> P2PWork:
        return self.between.begin(transfers, op)
