"""The hierarchical partition: documents to passes, to nodes, to devices (Zeppelin, arXiv 2509.21841, section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_overlap.schedules.varlen.balance import loads
from megatron_overlap.schedules.varlen.bin_packing import Item, Level, Spill, place
from megatron_overlap.schedules.varlen.plan import Pass, Plan, Ring, make_ring
from megatron_overlap.schedules.varlen.topology import CostModel, Topology

_MORE_PASSES = 8  # tried beyond the fewest that hold all tokens, before documents are put where they fit first
_FEWEST_ATTEMPTS, _MOST_ATTEMPTS = 2, 12
_BUDGET = 200_000  # documents placed in all attempts of a level, about: keeps large batches below a second


class CapacityError(ValueError):
    """A batch does not fit. Raised before anything runs, on every rank alike."""


def partition(
    lengths: Sequence[int],
    topology: Topology,
    *,
    capacity: int,
    cost: CostModel | None = None,
    max_passes: int | None = None,
) -> Plan:
    """Say which rank holds which tokens during attention, in as few passes as hold the batch.

    A document stays on one device where it can (local), else it becomes a ring inside a node (intra), else over several
    nodes (inter). It is cut where its attention exceeds a share of a bin's fair load, over just enough devices; any
    number of them, not only powers of two. Pure and deterministic: all arithmetic that decides is of integers and ties
    go to the lower index, so that every rank that knows the lengths computes this plan by itself. Nothing is kept
    between calls: a data loader calls it for the next batch while the current step computes.

    Args:
        lengths: tokens of each document. Empty documents get no place.
        topology: nodes and devices.
        capacity: tokens a rank may hold in one pass.
        cost: cost model; the default one describes an H100.
        max_passes: refuse batches that need more.

    Returns:
        The plan of all ranks.

    Raises:
        CapacityError: a document is longer than one pass of all ranks, or more than `max_passes` are needed.
        ValueError: a length is negative, or the capacity is below one token.
    """
    cost = cost or CostModel()
    check_room(lengths, topology, capacity)
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    items = [Item(lengths[document], lengths[document], document) for document in order if lengths[document]]
    groups = _to_passes(items, topology.ranks * capacity, cost, max_passes)
    attempts = max(_FEWEST_ATTEMPTS, min(_MOST_ATTEMPTS, _BUDGET // (len(items) + 1)))
    plan = Plan("balanced", tuple(lengths), topology, cost, capacity, ())
    return replace(plan, passes=tuple(_one_pass(group, index, plan, attempts) for index, group in enumerate(groups)))


def check_lengths(lengths: Sequence[int], capacity: int) -> None:
    """Refuse what no planner can place.

    Raises:
        ValueError: a length is negative, or the capacity is below one token.
    """
    if capacity < 1:
        raise ValueError(f"capacity: {capacity}: give at least 1 token")
    shortest = min(lengths, default=0)
    if shortest < 0:
        raise ValueError(f"lengths: {shortest}: document {lengths.index(shortest)} cannot have fewer than 0 tokens")


def check_room(lengths: Sequence[int], topology: Topology, capacity: int) -> None:
    """Refuse what no planner that cuts documents can place.

    Raises:
        CapacityError: a document is longer than one pass of all ranks.
        ValueError: see `check_lengths`.
    """
    check_lengths(lengths, capacity)
    longest, room = max(lengths, default=0), topology.ranks * capacity
    if longest > room:
        raise CapacityError(
            f"lengths: document {lengths.index(longest)} has {longest} tokens: {topology.ranks} ranks hold {room} in "
            f"one pass; raise capacity to {-(-longest // topology.ranks)} or cut the document"
        )


def _to_passes(items: list[Item], room: int, cost: CostModel, max_passes: int | None) -> list[list[Item]]:
    """Whole documents over passes, attention and tokens even; one more pass where they do not fit whole."""
    fewest = max(1, -(-sum(item.tokens for item in items) // room))
    most = fewest + _MORE_PASSES if max_passes is None else max_passes
    for count in range(fewest, most + 1):
        found = place(Level(count, room, cost, None, _FEWEST_ATTEMPTS), items)
        if found is not None:
            return found.items
    if max_passes is None:
        return _first_fit(items, room)
    raise CapacityError(
        f"lengths: {sum(item.tokens for item in items)} tokens do not fit whole into {max_passes} pass(es) of {room}: "
        f"raise capacity or max_passes"
    )


def _first_fit(items: list[Item], room: int) -> list[list[Item]]:
    """As many passes as it takes, for batches of few and very long documents."""
    groups: list[list[Item]] = []
    left: list[int] = []
    for item in items:
        index = next((index for index, free in enumerate(left) if free >= item.tokens), len(groups))
        if index == len(groups):
            groups.append([])
            left.append(room)
        groups[index].append(item)
        left[index] -= item.tokens
    return groups


def _one_pass(items: list[Item], index: int, plan: Plan, attempts: int) -> Pass:
    """Both ways to find room where that is tight, and the faster one."""
    part, tight = _laid(items, index, plan, attempts, "cut")
    if not tight:
        return part
    other, _ = _laid(items, index, plan, attempts, "shift")

    def step_fs(laid: Pass) -> int:
        return max(max(load.attention_fs, load.message_fs) for load in loads(replace(plan, passes=(laid,)), 0))

    return min(part, other, key=step_fs)


def _laid(items: list[Item], index: int, plan: Plan, attempts: int, spill: Spill) -> tuple[Pass, bool]:
    """A pass, and whether some document found no room whole."""
    topology, capacity, cost = plan.topology, plan.capacity, plan.cost
    devices = topology.devices_per_node

    def of_node(item: Item, cut: bool) -> int:
        return devices * cost.ring_fs(item.length, 1, topology, inter=True) if cut else 0

    def of_device(item: Item, cut: bool) -> int:
        inter = item.tokens < item.length
        return cost.ring_fs(item.length, 1, topology, inter=inter) if inter or cut else 0

    nodes = place(Level(topology.nodes, devices * capacity, cost, of_node, attempts, spill), items)
    assert nodes is not None, "cutting fits whatever the sum allows"
    tight = nodes.spilled
    local: list[tuple[int, ...]] = []
    shares: dict[int, list[tuple[int, int]]] = {}
    for node, held in enumerate(nodes.items):
        held.sort(key=lambda item: -item.tokens * (item.length + 1))
        found = place(Level(devices, capacity, cost, of_device, attempts, spill), held)
        assert found is not None, "cutting fits whatever the sum allows"
        tight |= found.spilled
        for device, mine in enumerate(found.items):
            rank = node * devices + device
            local.append(tuple(item.document for item in mine if item.tokens == item.length))
            for item in mine:
                if item.tokens != item.length:
                    shares.setdefault(item.document, []).append((rank, item.tokens))
    rings: list[Ring] = [make_ring(document, sorted(parts), topology) for document, parts in shares.items()]
    # The slow ones first, so that their messages are posted first; then by length and index, the same on every rank.
    rings.sort(key=lambda ring: (ring.zone != "inter", -ring.length, ring.document))
    return Pass(tuple(local), tuple(rings), index), tight
