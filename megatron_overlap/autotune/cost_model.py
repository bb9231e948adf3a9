"""The cost model: GEMMs by shape, memory traffic, messages and collectives, on a machine given by a profile. Pure.

A GEMM is `waves x one tile`: its output is cut into tiles, a wave is as many tiles as there are processors, and a
wave that is not full takes as long as one that is. So many small GEMMs cost more than one large one. A message is
`latency + bytes / rate` (alpha-beta); a ring collective is N - 1 of them. All results are modelled, none is measured.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatron_overlap.config.cluster import ClusterProfile, Elementwise, LinkProfile, Precision, RowRate

CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce"]
Mover = Literal["collective", "message", "copy"]
"""What moves bytes: NCCL's kernels for a collective or for a message, or copies."""

ITEM_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

TOUCHED: Mapping[Elementwise, tuple[float, float]] = {
    "rms_norm": (4, 7),
    "layer_norm": (4, 7),
    "add": (3, 0),
    "rotary": (2, 2),
    "repeat": (1, 1),  # of what is read and written together
    "scores": (4, 12),
    "swiglu": (3, 5),
    "gelu": (2, 3),
}
"""Elements that an operation between GEMMs reads and writes, forward and backward, for each element of its output.

Counted for operations that are fused as far as possible, except for `scores`, which is counted as torch runs it.
Forward masks in place and computes the softmax. The softmax backward reads two tensors and writes one; three more
operations and a zeroed copy follow. `PassRates` are rates of these bytes; a library may move another number of bytes.
"""

LOSS_BYTES = (38, 22)
"""Bytes for each logit, forward and backward. Megatron's cross entropy consists of elementwise steps in fp32: cast,
maximum, subtraction, exponential, sum and division; copy, product and cast of the gradient."""

MAIN_GRADIENT_BYTES = 8
"""Bytes of a fp32 main gradient that an addition reads and writes. The addition also reads the gradient itself."""

CLIP_BYTES = (8, 12)
"""Bytes for each parameter: its main gradient is zeroed and checked for NaN. Bytes for each parameter that this rank
updates: its main gradient is read for the norm, and read and written to be clipped."""

# The scheduler of the kernel runs both sides in turn: computation never stops.
_LEAST_RATE = 0.05
_US = 1e6


@dataclass(frozen=True, slots=True)
class Link:
    """The link of one rank to the others of its group. Rates are bytes per microsecond and direction.

    Attributes:
        per_node: ranks of the group on each node; 0: nodes have different numbers.
        latency_us, copy_rate: fixed cost and rate of one rank's point-to-point messages.
        collective_rate, scatter_rate: bus bandwidth of a ring collective, and of a reduce-scatter.
        ring_latency_us: fixed cost of a whole ring collective, all its hops together.
        all_reduce_rate: bus bandwidth of an all-reduce relative to the bytes of an all-gather; None: a reduce-scatter
            and an all-gather.
        copy_us, further_us, flag_us: of the copy engines between these ranks; None: they have none.
    """

    size: int
    per_node: int
    latency_us: float
    copy_rate: float
    collective_rate: float
    scatter_rate: float
    ring_latency_us: float
    all_reduce_rate: float | None = None
    copy_us: float | None = None
    further_us: float = 0.0
    flag_us: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """Times on one machine, in microseconds.

    Raises ValueError if the profile has no peak for `precision`, that of tensors.
    """

    profile: ClusterProfile
    precision: Precision = "bf16"

    def __post_init__(self) -> None:
        self.profile.peak_tflops(self.precision)

    @property
    def item_bytes(self) -> int:
        """Bytes of one activation or weight."""
        return ITEM_BYTES[self.precision]

    @property
    def launch_us(self) -> float:
        """Fixed time of one kernel launch."""
        return self.profile.device.launch_us.value

    @property
    def on_device(self) -> bool:
        """Whether the host enqueues work on a device that runs it later."""
        return self.profile.device.call_us is None

    @property
    def enqueue_us(self) -> float:
        """Host time of one point-to-point message."""
        cost = self.profile.device.enqueue_us
        return 0.0 if cost is None else cost.value

    def gemm_us(self, m: int, n: int, k: int) -> float:
        """Time of `[m, k] x [k, n]`: the larger of full waves of computation and memory traffic, and one launch."""
        if 0 in (m, n, k):  # an empty piece is not launched
            return 0.0
        device, gemm = self.profile.device, self.profile.device.gemm
        peak = self.profile.peak_tflops(self.precision) * 1e12 * gemm.efficiency.value
        memory_rate = device.memory_gbps.value * 1e9
        compute = 2.0 * m * n * k / peak * _US
        if gemm.tiles:
            # A wave multiplies, then writes its tiles. With a small k the write is not hidden.
            compute = min(
                math.ceil(math.ceil(m / rows) * math.ceil(n / columns) / gemm.processors)
                * (2.0 * rows * columns * k / (peak * rate) + rows * columns * self.item_bytes / memory_rate)
                * gemm.processors
                * _US
                for rows, columns, rate in ((tile.rows, tile.columns, tile.rate) for tile in gemm.tiles)
            )
        traffic = (m * k + n * k + m * n) * self.item_bytes / memory_rate * _US
        return max(compute, traffic) / _row_rate(gemm.rows, m) + self.launch_us

    def memory_us(self, num_bytes: float, kind: Elementwise | None = None, *, backward: bool = False) -> float:
        """Time to read and write `num_bytes` in all, at the rate of `kind` if the profile has it, or of the memory."""
        if num_bytes <= 0:
            return 0.0
        device = self.profile.device
        rates = None if kind is None else getattr(device.elementwise, kind)
        rate = device.memory_gbps.value
        if rates is not None:
            rate = rates.backward if backward and rates.backward is not None else rates.forward
        return num_bytes / (rate * 1e9) * _US + self.launch_us

    def elementwise_us(self, kind: Elementwise, outputs: float, *, backward: bool = False) -> float:
        """Time of an operation between GEMMs with so many elements of its output; see `TOUCHED`."""
        return self.memory_us(TOUCHED[kind][backward] * outputs * self.item_bytes, kind, backward=backward)

    def calls_us(self, calls: float, *, loop: bool = False) -> float:
        """Host time of calls of the tensor library; `loop`: only of their launches, without modules and autograd."""
        call = self.profile.device.call_us
        if call is None:
            return 0.0
        return calls * (self.launch_us if loop else call.value)

    def attention_us(self, flops: float, *, backward: bool = False, fused: bool = True) -> float:
        """Time of attention with `flops` operations.

        Fused attention counts no masked operation. Without `fused`: the products of attention that keeps its scores,
        masked ones included, at the rate of scores in the profile, or of a GEMM.
        """
        device = self.profile.device
        share = device.attention_backward if backward else device.attention_forward
        if not fused and device.elementwise.scores is None:
            share = device.gemm.efficiency
        return flops / (self.profile.peak_tflops(self.precision) * 1e12 * share.value) * _US + self.launch_us

    def link(self, size: int, stride: int = 1) -> Link:
        """The link of a group of `size` ranks that are `stride` apart. Consecutive ranks share a node.

        If the group spans nodes, all groups of a node communicate between nodes at the same time, and each has its
        share of the NICs. A message of a rank uses one NIC at most, a ring as many as the group has ranks in the node
        with the fewest (NCCL's rings cross a node by every NIC).
        """
        inside, between, per_node = self.profile.inside, self.profile.between, self.profile.devices_per_node
        together = min(size, max(1, per_node // stride))
        rates: Sequence[float] = _rates(inside)
        latency = inside.latency_us.value
        ring_latency = (size - 1) * latency
        if size > together:
            ring_latency += (-(-size // together) - 1) * (between.latency_us.value - latency)
            nics = between.nics_per_node / per_node
            latency = between.latency_us.value
            # A group with one rank in each node has no link inside a node that limits it.
            limits = rates if together > 1 else (math.inf,) * 4
            shares = (min(1.0, nics * together), *[nics * math.gcd(size, together)] * 3)
            rates = [min(most, rate * share) for most, rate, share in zip(limits, _rates(between), shares, strict=True)]
        copy, gather, scatter, reduce = (rate * 1e3 for rate in rates)
        evenly = 0 if size % together else together
        link = Link(size, evenly, latency, copy, gather, scatter, ring_latency, None if math.isinf(reduce) else reduce)
        engines = inside.copy_engines
        if engines is None or size > together:
            return link
        costs = {name: getattr(engines, name).value for name in ("copy_us", "further_us", "flag_us")}
        return replace(link, **costs)

    def message_us(self, num_bytes: float, link: Link) -> float:
        """One message from one rank to another."""
        return link.latency_us + num_bytes / link.copy_rate

    def mover(self, link: Link) -> Mover:
        """What sends messages on a device, by default: copy engines between ranks of a node, else NCCL."""
        return "copy" if link.copy_us is not None else "message"

    def queued_us(self, link: Link, mover: Mover, num_flags: int = 2, num_copies: int = 1) -> float:
        """Fixed time of a call in the queue of sends of a device; a batch of copies has flags, set or waited for."""
        if mover == "message":  # a kernel of NCCL; the next one starts when it has ended
            return link.latency_us + self.launch_us
        assert link.copy_us is not None
        return link.copy_us + (num_copies - 1) * link.further_us + num_flags * link.flag_us

    def all_to_all_us(self, num_bytes: float, size: int) -> float:
        """An all-to-all of consecutive ranks; `num_bytes` is the buffer of one rank, an equal part for each rank."""
        # Messages inside a node and between nodes are concurrent.
        if size == 1 or num_bytes <= 0:
            return 0.0
        near, link = min(size, self.profile.devices_per_node), self.link(size)
        inside_us = num_bytes * (near - 1) / size / self.link(near).copy_rate
        return link.latency_us + max(inside_us, num_bytes * (size - near) / size / link.copy_rate) + self.launch_us

    def collective_us(self, kind: CollectiveKind, num_bytes: float, link: Link) -> float:
        """A ring collective; `num_bytes` is the whole gathered or unreduced buffer of one rank."""
        if link.size == 1 or num_bytes <= 0:
            return 0.0
        moved = num_bytes * (link.size - 1) / link.size
        gather = link.ring_latency_us + moved / link.collective_rate
        scatter = link.ring_latency_us + moved / link.scatter_rate
        both = scatter + gather
        if link.all_reduce_rate is not None:
            both = 2 * link.ring_latency_us + moved / link.all_reduce_rate
        return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": both}[kind] + self.launch_us

    def late_us(self, computed_us: float) -> float:
        """Rank skew after a computation time since the last synchronization: see `Contention.late`; at least 0."""
        low = below = slope = 0.0
        for point in self.profile.contention.late:
            high, above = point.computed_us.value, point.late_us.value
            slope = (above - below) / (high - low)
            if computed_us <= high:
                break
            low, below = high, above
        return max(0.0, below + slope * (computed_us - low))

    def compute_rate(self, kind: Mover, bytes_per_us: float) -> float:
        """Relative speed of computation while the rank sends and receives `bytes_per_us` in all."""
        contention = self.profile.contention
        lost = contention.copy_.value if kind == "copy" else contention.collective.value
        host = contention.host_us_per_mb.value * bytes_per_us / 1e6
        return max(_LEAST_RATE, 1.0 - lost - host)


def _rates(link: LinkProfile) -> tuple[float, float, float, float]:
    """GB/s of messages, gathers, reduce-scatters and all-reduces."""
    gather = link.collective_gbps.value
    scatter = gather if link.reduce_scatter_gbps is None else link.reduce_scatter_gbps.value
    reduce = math.inf if link.all_reduce_gbps is None else link.all_reduce_gbps.value
    return link.copy_gbps.value, gather, scatter, reduce


def _row_rate(points: Sequence[RowRate], m: int) -> float:
    """The measured rate at `m` rows, between points linear in the logarithm of the rows; 1 without a table."""
    if not points:
        return 1.0
    if m <= points[0].rows:
        return points[0].rate
    for low, high in zip(points, points[1:], strict=False):
        if m <= high.rows:
            part = math.log(m / low.rows) / math.log(high.rows / low.rows)
            return low.rate + part * (high.rate - low.rate)
    return points[-1].rate
