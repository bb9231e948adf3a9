"""Cluster topology and cost model: nodes and links, and the time that attention and messages take on them.

Times are integer femtoseconds. Integer comparisons and sums give the same result on every rank and in every order of
the terms, so all ranks break ties alike.
"""

from dataclasses import dataclass

FS_PER_US = 10**9


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes of equal size. Rank r is device `r % devices_per_node` of node `r // devices_per_node`.

    Attributes:
        nics_per_node: NICs of a node. Device d is adjacent to NIC `d * nics_per_node // devices_per_node`.
        intra_gbps, inter_gbps: bandwidth between two devices of a node, and of one NIC, GB/s in one direction.
        intra_latency_us, inter_latency_us: time of an empty message inside a node, and between nodes, microseconds.
        routing: transfers between nodes may use all NICs of a node (`schedules.varlen.message_order`).

    Raises:
        ValueError: a count is below one, or a bandwidth or latency is not positive.
    """

    nodes: int
    devices_per_node: int
    nics_per_node: int = 1
    intra_gbps: float = 360.0
    inter_gbps: float = 48.0
    intra_latency_us: float = 4.0
    inter_latency_us: float = 10.0
    routing: bool = True

    def __post_init__(self) -> None:
        for name in ("nodes", "devices_per_node", "nics_per_node"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)}: give at least 1")
        for name in ("intra_gbps", "inter_gbps", "intra_latency_us", "inter_latency_us"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: {getattr(self, name)}: give a number above 0")

    @property
    def ranks(self) -> int:
        return self.nodes * self.devices_per_node

    def node_of(self, rank: int) -> int:
        return rank // self.devices_per_node

    def is_inter(self, source: int, to: int) -> bool:
        """Whether two ranks are on different nodes."""
        return self.node_of(source) != self.node_of(to)

    def nic_of(self, rank: int) -> int:
        """The NIC, numbered within its node, that is adjacent to a rank."""
        return rank % self.devices_per_node * self.nics_per_node // self.devices_per_node


@dataclass(frozen=True, slots=True)
class CostModel:
    """Modelled time of one layer on one device.

    The defaults are fitted to forward times of causal attention measured on an H100 (64 query heads, 4 key/value heads,
    head size 128, bf16: 1.06 ms at 4K tokens, 13.5 ms at 16K, 206 ms at 64K), and to linear layers at 600 TFLOP/s.

    Attributes:
        pair_fs: attention time of one query-key pair, all heads.
        token_fs: attention time per token, independent of the document's length.
        floor_fs: least attention time of a document: the kernel computes a whole tile.
        linear_fs: time of the linear layers per token.
        kv_bytes: bytes of the keys and values of one token, all heads.

    Raises:
        ValueError: a cost is negative, or `pair_fs` is 0.
    """

    pair_fs: int = 96_000
    token_fs: int = 60_000_000
    floor_fs: int = 1_000_000_000
    linear_fs: int = 2_850_000_000
    kv_bytes: int = 2048

    def __post_init__(self) -> None:
        for name in ("token_fs", "floor_fs", "linear_fs", "kv_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}: {getattr(self, name)}: give 0 or more")
        if self.pair_fs < 1:
            raise ValueError(f"pair_fs: {self.pair_fs}: give at least 1")

    def share_fs(self, tokens: int, length: int) -> int:
        """Time of causal attention for a zigzag share: `tokens` queries of a document of `length` tokens.

        A zigzag share has as many early as late tokens, so its queries see (length + 1) / 2 keys on average for every
        share size. `tokens == length` is the whole document.
        """
        attention_fs = tokens * ((length + 1) * self.pair_fs + 2 * self.token_fs) // 2
        return max(self.floor_fs, attention_fs) if tokens else 0

    def attention_fs(self, pairs: int, tokens: int) -> int:
        """Time of attention for `tokens` queries with `pairs` query-key pairs."""
        return max(self.floor_fs, pairs * self.pair_fs + tokens * self.token_fs) if tokens else 0

    def ring_fs(self, tokens: int, hops: int, topology: Topology, *, inter: bool) -> int:
        """Time to receive the keys and values of `tokens` tokens in `hops` ring steps."""
        gbps, latency_us = topology.intra_gbps, topology.intra_latency_us
        if inter:
            nics = topology.nics_per_node if topology.routing else 1
            gbps, latency_us = min(topology.inter_gbps * nics, topology.intra_gbps), topology.inter_latency_us
        return tokens * self.kv_bytes * round(1e6 / gbps) + hops * round(latency_us * FS_PER_US)
