"""A model of one layer on documents of different lengths, on a cluster: what `simulate_varlen.py` plays plans on.

Forward and backward: attention in tiles of 128 by 128 and with the merge of every partial result, messages over the
cards and links that the plan's rings use, linear layers on the tokens that a rank has, rebalancing hidden behind
attention.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby

from bench.placements import hybrid

from megatron_overlap.autotune.cost_model import CostModel as Machine
from megatron_overlap.config import ModelConfig
from megatron_overlap.config.cluster import load_cluster_profile
from megatron_overlap.config.launch import PRESETS
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology, partition
from megatron_overlap.schedules.varlen.partition import ring_over_all
from megatron_overlap.schedules.varlen.plan import Pass
from megatron_overlap.schedules.varlen.rebalance import rebalance
from megatron_overlap.schedules.varlen.ring_groups import RingGroup, ring_groups

_TILE = 128
_FS = 1e9  # in a microsecond


@dataclass(frozen=True, eq=False)
class Layer:
    """Costs of one layer on one machine.

    Attributes:
        machine: GEMMs, memory, attention.
        model: its shape.
        topology: links as the planners see them.
    """

    machine: Machine
    model: ModelConfig
    topology: Topology

    @cached_property
    def kv_bytes(self) -> int:
        """Keys and values of a token."""
        return 2 * self.model.num_query_groups * self.model.head_size * self.machine.item_bytes

    def tiles_us(self, queries: float, keys: float, *, causal: bool = False, backward: bool = False) -> float:
        """Attention of some queries with some keys; tiles are computed in full."""
        area = max(1.0, queries / _TILE) * max(1.0, keys / _TILE)
        if causal:
            area = (area + max(1.0, queries / _TILE)) / 2
        return area * self._tile_us[backward]

    @cached_property
    def _tile_us(self) -> tuple[float, float]:
        """One tile, forward and backward."""
        flops = 1e3 * 4 * self.model.num_attention_heads * self.model.head_size * _TILE**2
        forward, backward = (self.machine.attention_us(flops * n, backward=n > 1) for n in (1, 2.5))
        return (forward - self.machine.launch_us) / 1e3, (backward - self.machine.launch_us) / 1e3

    def merge_us(self, tokens: float, *, backward: bool = False) -> float:
        """One more partial result: read it and the sum in fp32, write the sum; backward, of keys and values as well."""
        width = self.model.num_attention_heads * self.model.head_size
        bytes_ = tokens * width * (8 + self.machine.item_bytes)
        if backward:
            bytes_ += tokens * self.kv_bytes / self.machine.item_bytes * (8 + self.machine.item_bytes)
        return self.machine.memory_us(bytes_)

    def linear_us(self, tokens: int) -> float:
        """Linear layers, forward and backward: three times the forward GEMMs."""
        model = self.model
        queries = model.num_attention_heads * model.head_size
        keys = 2 * model.num_query_groups * model.head_size
        shapes = [(queries + keys, model.hidden_size), (model.hidden_size, queries)]
        shapes += [(model.ffn_hidden_size * 2, model.hidden_size), (model.hidden_size, model.ffn_hidden_size)]
        return 3 * sum(self.machine.gemm_us(tokens, n, k) for n, k in shapes) if tokens else 0.0

    def rest_us(self, tokens: int) -> float:
        """A layer's part of a step of one micro-batch that is the same for all: logits, gradients, optimizer."""
        model, machine, ranks = self.model, self.machine, self.topology.ranks
        layer = model.hidden_size * (2 * model.hidden_size + self.kv_bytes / 2 + 3 * model.ffn_hidden_size)
        ends = 2 * model.vocab_size * model.hidden_size / model.num_layers
        link = machine.link(ranks)
        moved = machine.collective_us("reduce_scatter", 4 * (layer + ends), link)
        moved += machine.collective_us("all_gather", 2 * (layer + ends), link)
        logits = 3 * machine.gemm_us(tokens, model.vocab_size, model.hidden_size)
        logits += machine.memory_us(60 * tokens * model.vocab_size)
        optimizer = machine.memory_us(machine.profile.device.optimizer_bytes.value * (layer + ends) / ranks)
        return moved + optimizer + logits / model.num_layers

    def cost(self) -> CostModel:
        """The planners' model of the same layer."""
        pair = self.tiles_us(_TILE, _TILE) / _TILE**2 * _FS
        linear = self.linear_us(8192) / 8192 / 3.5 * _FS
        floor = self.tiles_us(1, 1) * _FS
        return CostModel(max(1, round(pair)), 0, round(floor), round(linear), self.kv_bytes)


def layer_of(profile: str, preset: str, ranks: int) -> Layer:
    """A model's layer on as many nodes of a profile's machine as the ranks fill."""
    machine = Machine(load_cluster_profile(profile))
    cluster = machine.profile
    topology = Topology(
        ranks // cluster.devices_per_node,
        cluster.devices_per_node,
        cluster.between.nics_per_node,
        intra_gbps=cluster.inside.copy_gbps.value,
        inter_gbps=cluster.between.copy_gbps.value,
        intra_latency_us=cluster.inside.latency_us.value,
        inter_latency_us=cluster.between.latency_us.value,
    )
    shape = ModelConfig.model_validate({"preset": preset, **PRESETS[preset]})
    return Layer(machine, shape, topology)


def ring_work(layer: Layer, ring_group: RingGroup, place: int, *, backward: bool) -> tuple[float, float]:
    """Time of a member's own rows and of one visit, of all rings of a ring_group."""
    own = visit = tokens = 0.0
    for ring in ring_group.rings:
        share = ring.tokens(place)
        half = share / 2
        tokens += share
        own += 2 * layer.tiles_us(half, half, causal=True, backward=backward)
        own += layer.tiles_us(half, half, backward=backward)
        visit += layer.tiles_us(share, ring.length / len(ring.ranks) / 2, backward=backward)
    launch = layer.machine.launch_us
    return own + 2 * launch, visit + launch + layer.merge_us(tokens, backward=backward)


class Links:
    """How long the messages of ring_groups take that are on their way together."""

    def __init__(self, layer: Layer, row_bytes: int, *, routing: bool) -> None:
        self._topology, self._row_bytes, self._routing = layer.topology, row_bytes, routing
        self._bytes: dict[tuple[object, ...], float] = defaultdict(float)

    def add(self, ring_group: RingGroup) -> None:
        """Its messages: G - 1 early chunks go from each place to the one before, and late ones of places behind it."""
        size = len(ring_group.ranks)
        chunk = sum(ring.length for ring in ring_group.rings) / size / 2 * self._row_bytes
        for place, key, part in self._links(ring_group):
            late = size - place if place else 0
            self._bytes[key] += chunk * (size - 1 + late) * part

    def us(self, ring_group: RingGroup) -> float:
        """The ring_group's slowest link, with all that goes over it; and the latencies of its steps."""
        topology = self._topology
        rates = {"card": topology.inter_gbps * 1e3, "inside": topology.intra_gbps * 1e3}
        slowest = max(self._bytes[key] / rates[str(key[0])] for _, key, _ in self._links(ring_group))
        latency = topology.inter_latency_us if ring_group.zone == "inter" else topology.intra_latency_us
        if self._routing and ring_group.zone == "inter":
            latency += 2 * topology.intra_latency_us
        return slowest + (len(ring_group.ranks) - 1) * latency

    def _links(self, ring_group: RingGroup) -> Iterator[tuple[int, tuple[object, ...], float]]:
        """Places, the cards and inside links that their messages go over, and what part of a message."""
        topology = self._topology
        for place, source in enumerate(ring_group.ranks):
            to = ring_group.ranks[place - 1]
            node, far = topology.node_of(source), topology.node_of(to)
            if node == far:
                yield place, ("inside", source, "out"), 1.0
                continue
            if not self._routing:
                yield place, ("card", node, topology.nic_of(source), "out"), 1.0
                yield place, ("card", far, topology.nic_of(to), "in"), 1.0
                continue
            cards = topology.nics_per_node
            for card in range(cards):
                yield place, ("card", node, card, "out"), 1 / cards
                yield place, ("card", far, card, "in"), 1 / cards
            yield place, ("inside", source, "out"), (cards - 1) / cards
            yield place, ("inside", to, "in"), (cards - 1) / cards


def attention_us(layer: Layer, plan: Plan, *, engine: bool, routing: bool, gathered: bool = False) -> float:
    """Attention of all passes, forward and backward; ranks meet after every stage."""
    total = 0.0
    for backward in (False, True):
        for _, stage in groupby(plan.passes, key=lambda part: part.stage):
            times = [0.0] * layer.topology.ranks
            for part in stage:
                for rank, us in enumerate(_pass_us(layer, plan, part, engine, routing, gathered, backward)):
                    times[rank] += us
            total += max(times)
    return total


def _pass_us(
    layer: Layer, plan: Plan, part: Pass, engine: bool, routing: bool, gathered: bool, backward: bool
) -> list[float]:
    """Every rank's time. The engine posts all messages first and hides them behind anything; else ring by ring."""
    # Backward: keys, values, and their gradients in fp32.
    row_bytes = layer.kv_bytes * 3 if backward else layer.kv_bytes
    found = ring_groups(part)
    links = Links(layer, row_bytes, routing=routing)
    for ring_group in found:
        links.add(ring_group)
    computed, chained, messages = ([0.0] * layer.topology.ranks for _ in range(3))
    for rank, documents in enumerate(part.local):
        lengths = [plan.lengths[document] for document in documents]
        if lengths:
            us = sum(layer.tiles_us(length, length, causal=True, backward=backward) for length in lengths)
            computed[rank] = chained[rank] = us + layer.machine.launch_us
    for ring_group in found:
        alone = links
        if not engine:
            alone = Links(layer, row_bytes, routing=routing)
            alone.add(ring_group)
        steps = len(ring_group.ranks) - 1
        message = alone.us(ring_group)
        for place, rank in enumerate(ring_group.ranks):
            own, visit = ring_work(layer, ring_group, place, backward=backward)
            if gathered:
                # One kernel for all keys; nothing to merge, nothing hidden.
                visit -= layer.machine.launch_us
                visit -= layer.merge_us(sum(ring.tokens(place) for ring in ring_group.rings), backward=backward)
            computed[rank] += own + steps * visit
            step = message / steps
            chained[rank] += max(own, step) + (steps - 1) * max(visit, step) + visit
            messages[rank] = max(messages[rank], message + visit)
    if gathered:
        return [a + b for a, b in zip(computed, _gather_us(layer, part, row_bytes), strict=True)]
    return list(map(max, computed, messages)) if engine else chained


def _gather_us(layer: Layer, part: Pass, row_bytes: int) -> list[float]:
    """A ring collective over all ranks, with the profile's bus bandwidth: it uses every card."""
    ranks = layer.topology.ranks
    num_bytes = sum(ring.length for ring in part.rings) * row_bytes
    return [layer.machine.collective_us("all_gather", num_bytes, layer.machine.link(ranks))] * ranks


def linear_us(layer: Layer, plan: Plan) -> float:
    """Linear layers on the tokens that attention leaves on each rank."""
    return sum(layer.linear_us(max(plan.tokens(index))) for index in range(len(plan.passes)))


def rebalance_us(layer: Layer, plan: Plan) -> float:
    """The moves between attention and linear layers: q, k, v there, the result back, and their gradients."""
    topology, total = layer.topology, 0.0
    width = layer.model.num_attention_heads * layer.model.head_size * layer.machine.item_bytes
    row_bytes = 2 * (2 * width + layer.kv_bytes)
    for index in range(len(plan.passes)):
        busy: dict[int, float] = defaultdict(float)
        for move in rebalance(plan.tokens(index), topology).moves:
            inside = topology.node_of(move.source) == topology.node_of(move.to)
            rate = topology.intra_gbps if inside else min(topology.inter_gbps, topology.intra_gbps)
            for end in (move.source, move.to):
                busy[end] += move.rows * row_bytes / rate / 1e3
        total += max(busy.values(), default=0.0) + (4 * topology.inter_latency_us if busy else 0.0)
    return total


def even_linear_us(layer: Layer, plan: Plan) -> float:
    """Linear layers on as many tokens on every rank."""
    return sum(layer.linear_us(-(-sum(plan.tokens(i)) // layer.topology.ranks)) for i in range(len(plan.passes)))


def times_us(layer: Layer, lengths: Sequence[int], per_rank: int) -> dict[str, float]:
    """Attention and linear layers of a batch, by every way."""
    capacity = per_rank + -(-per_rank // 16)
    cost, topology = layer.cost(), layer.topology
    direct = replace(topology, routing=False)
    ring = ring_over_all(lengths, direct, capacity=capacity, cost=cost)
    ours = partition(lengths, topology, capacity=capacity, cost=cost)
    plain = partition(lengths, direct, capacity=capacity, cost=cost)
    groups = hybrid(lengths, direct, capacity=capacity, cost=cost)

    def step(plan: Plan, linear: Callable[[Layer, Plan], float] = linear_us, **how: bool) -> float:
        return attention_us(layer, plan, **{"engine": False, "routing": False, **how}) + linear(layer, plan)

    attention = attention_us(layer, ours, engine=True, routing=True)
    return {
        "ring": step(ring),
        "all-gather": step(ring, gathered=True),
        "hybrid": step(groups, _hybrid_linear_us),
        "routing": step(ring, routing=True),
        "partition": step(plain),
        "partition+engine": step(plain, engine=True),
        "partition+engine+routing": attention + linear_us(layer, ours),
        "+remap": max(attention, rebalance_us(layer, ours)) + even_linear_us(layer, ours),
    }


def _hybrid_linear_us(layer: Layer, plan: Plan) -> float:
    """Passes are micro-batches; ranks meet after stages alone."""
    total = 0.0
    for _, stage in groupby(range(len(plan.passes)), key=lambda index: plan.passes[index].stage):
        times = [0.0] * layer.topology.ranks
        for index in stage:
            for rank, tokens in enumerate(plan.tokens(index)):
                times[rank] += layer.linear_us(tokens)
        total += max(times)
    return total
