"""Hierarchical partition of documents over nodes and devices (Zeppelin, arXiv 2509.21841, section 4.1).

`METHODS` also has the placements that it is compared with, in the same plan format: one engine executes them all.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from megatron_overlap.schedules.varlen.bin_packing import Item, Level, Spill, place
from megatron_overlap.schedules.varlen.plan import Exchange, Pass, Plan, Ring, loads, make_ring
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

_FEWEST_ATTEMPTS, _MOST_ATTEMPTS = 2, 12
_BUDGET = 200_000  # about the number of documents placed in all attempts of a level: limits large batches to a second


class CapacityError(ValueError):
    """A batch does not fit. Every rank raises it alike, before any communication."""


def partition(lengths: Sequence[int], topology: Topology, *, capacity: int, cost: CostModel | None = None) -> Plan:
    """Assigns the tokens of a batch to ranks for attention, in one pass.

    A document stays whole on one device if possible (local). Otherwise it becomes a ring inside a node (intra), or over
    several nodes (inter). A document is cut if its attention time exceeds a fraction of the mean load of a bin, over as
    few devices as needed; their number need not be a power of two.

    Every rank that knows the lengths computes the same plan: decisions use integers, and ties go to the lower index.

    Args:
        lengths: tokens of each document. Empty documents are not placed.
        capacity: tokens a rank may hold.
        cost: cost model; the default describes an H100.

    Raises:
        CapacityError: the batch has more tokens than all ranks may hold.
        ValueError: a length is negative, or the capacity is below one token.
    """
    cost = cost or CostModel()
    _check(lengths, topology, capacity)
    items = [Item(n, n, document, cost.share_fs(n, n)) for document, n in enumerate(lengths) if n]
    items.sort(key=lambda item: item.tokens, reverse=True)
    attempts = max(_FEWEST_ATTEMPTS, min(_MOST_ATTEMPTS, _BUDGET // (len(items) + 1)))
    plan = Plan("balanced", tuple(lengths), topology, cost, capacity, ())
    found, spilled = _place_all(items, plan, attempts, "cut")
    if not spilled:
        return found
    # Some document fits whole on no rank or node. Plan once with each value of `Spill`; return the faster plan.
    other, _ = _place_all(items, plan, attempts, "shift")
    return min(found, other, key=lambda each: max(max(load.attention_fs, load.message_fs) for load in loads(each, 0)))


def _check(lengths: Sequence[int], topology: Topology, capacity: int) -> None:
    """Raises the errors of `partition`."""
    if capacity < 1:
        raise ValueError(f"capacity: {capacity}: give at least 1 token")
    shortest = min(lengths, default=0)
    if shortest < 0:
        raise ValueError(f"lengths: {shortest}: document {lengths.index(shortest)} cannot have fewer than 0 tokens")

    total, room = sum(lengths), topology.ranks * capacity
    if total > room:
        raise CapacityError(
            f"lengths: {total} tokens: {topology.ranks} ranks hold {room}; raise capacity to "
            f"{-(-total // topology.ranks)} or give fewer documents"
        )


def _place_all(items: list[Item], plan: Plan, attempts: int, spill: Spill) -> tuple[Plan, bool]:
    """`plan` with all items placed, and whether some document fitted nowhere whole."""
    topology, capacity, cost = plan.topology, plan.capacity, plan.cost
    devices = topology.devices_per_node

    def node_message_fs(item: Item, cut: bool) -> int:
        return devices * cost.ring_fs(item.length, 1, topology, inter=True) if cut else 0

    def device_message_fs(item: Item, cut: bool) -> int:
        inter = item.tokens < item.length
        return cost.ring_fs(item.length, 1, topology, inter=inter) if inter or cut else 0

    nodes = place(Level(topology.nodes, devices * capacity, cost, node_message_fs, attempts, spill), items)
    spilled = nodes.spilled
    local: list[tuple[int, ...]] = []
    shares: dict[int, list[tuple[int, int]]] = {}
    for node, held in enumerate(nodes.items):
        held.sort(key=lambda item: -item.tokens * (item.length + 1))
        found = place(Level(devices, capacity, cost, device_message_fs, attempts, spill), held)
        spilled |= found.spilled
        for device, mine in enumerate(found.items):
            rank = node * devices + device
            local.append(tuple(item.document for item in mine if item.tokens == item.length))
            for item in mine:
                if item.tokens != item.length:
                    shares.setdefault(item.document, []).append((rank, item.tokens))
    rings: list[Ring] = [make_ring(document, sorted(parts), topology) for document, parts in shares.items()]
    # Inter-node rings first, so that the slowest messages are posted first; then by length and index on every rank.
    rings.sort(key=lambda ring: (ring.zone != "inter", -ring.length, ring.document))
    return replace(plan, passes=(Pass(tuple(local), tuple(rings), 0),)), spilled


def ring_over_all(
    lengths: Sequence[int],
    topology: Topology,
    *,
    capacity: int,
    cost: CostModel | None = None,
    exchange: Exchange = "ring",
) -> Plan:
    """Every document over every rank in zigzag order, pass-KV around one ring (TransformerEngine's `p2p`).

    It has no padding, unlike TransformerEngine: padding would only make this baseline slower. With
    `exchange="all_gather"` every rank gathers all keys and values before it computes.

    Raises:
        CapacityError, ValueError: see `partition`.
    """
    _check(lengths, topology, capacity)
    local: list[list[int]] = [[] for _ in range(topology.ranks)]
    rings, tokens = list[Ring](), 0
    for document, length in enumerate(lengths):
        if length == 1 or (length and topology.ranks == 1):
            local[tokens % topology.ranks].append(document)
        elif length:
            rings.append(even_ring(document, length, range(topology.ranks), tokens, topology))
        tokens += length
    part = Pass(tuple(map(tuple, local)), tuple(rings), 0)
    return Plan(exchange, tuple(lengths), topology, cost or CostModel(), capacity, (part,), exchange)


METHODS: dict[str, Callable[..., Plan]] = {
    "balanced": partition,
    "ring": ring_over_all,
    "all_gather": partial(ring_over_all, exchange="all_gather"),
}


def even_ring(document: int, length: int, ranks: Sequence[int], first: int, topology: Topology) -> Ring:
    """A ring of equal shares. The remainder goes, one token each, to the members from number `first` on.

    If each document continues where the previous one ended, the shares of many documents add up evenly.
    """
    size = len(ranks)
    share, extra = divmod(length, size)
    counts = [share + ((position - first) % size < extra) for position in range(size)]
    return make_ring(document, [(rank, n) for rank, n in zip(ranks, counts, strict=True) if n], topology)
