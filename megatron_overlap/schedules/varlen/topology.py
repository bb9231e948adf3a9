"""What the planners know of a machine: its links, and how long attention and messages take on it.

Times are whole femtoseconds. Integers have one order on every machine, so that no two ranks can break a tie
differently, and a sum does not depend on the order of its terms.
"""

from __future__ import annotations

from dataclasses import dataclass

FS_PER_US = 10**9


@dataclass(frozen=True, slots=True)
class Topology:
    """Nodes of equal size. Rank r is device `r % devices_per_node` of node `r // devices_per_node`.

    Attributes:
        nodes: number of nodes.
        devices_per_node: ranks in each node.
        nics_per_node: network cards of a node; device d sits next to card `d * nics_per_node // devices_per_node`.
        intra_gbps: bandwidth of one device to another of its node, gigabytes per second, one direction.
        inter_gbps: bandwidth of one network card, gigabytes per second, one direction.
        intra_latency_us: time of an empty message inside a node, microseconds.
        inter_latency_us: time of an empty message between nodes, microseconds.
        routing: transfers between nodes may use all cards of the node (`schedules.varlen.routing`).

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

    def nic_of(self, rank: int) -> int:
        """The card, within its node, that a rank sits next to."""
        return rank % self.devices_per_node * self.nics_per_node // self.devices_per_node


@dataclass(frozen=True, slots=True)
class CostModel:
    """How long one layer takes on one device.

    The defaults are fitted to measured forward times of causal attention on an H100 (64 query heads, 4 key/value heads,
    head size 128, bf16: 1.06 ms at 4K tokens, 13.5 at 16K, 206 at 64K), and to the linear layers of a model of that
    width at 600 TFLOP/s.

    Attributes:
        pair_fs: one query with one key, all heads.
        token_fs: what attention costs per token whatever the document's length.
        floor_fs: no document takes less, however short: a tile of the kernel is computed in full.
        linear_fs: linear layers, per token.
        kv_bytes: keys and values of one token, all heads.

    Raises:
        ValueError: a cost is negative, or attention is free.
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
        """Causal attention of `tokens` queries of a document of `length` tokens, placed zigzag.

        A zigzag share holds as many early as late tokens, so its queries see (length + 1) / 2 keys on average whatever
        the share's size: `tokens == length` is the whole document.
        """
        if tokens == 0:
            return 0
        return max(self.floor_fs, tokens * ((length + 1) * self.pair_fs + 2 * self.token_fs) // 2)

    def attention_fs(self, pairs: int, tokens: int) -> int:
        """Attention of `tokens` queries that see `pairs` keys in all."""
        if tokens == 0:
            return 0
        return max(self.floor_fs, pairs * self.pair_fs + tokens * self.token_fs)

    def ring_fs(self, tokens: int, hops: int, topology: Topology, *, inter: bool) -> int:
        """Time of a ring in which `tokens` of keys and values come in over `hops` messages."""
        if hops == 0:
            return 0
        gbps, latency_us = topology.intra_gbps, topology.intra_latency_us
        if inter:
            cards = topology.nics_per_node if topology.routing else 1
            gbps, latency_us = min(topology.inter_gbps * cards, topology.intra_gbps), topology.inter_latency_us
        return tokens * self.kv_bytes * round(1e6 / gbps) + hops * round(latency_us * FS_PER_US)
