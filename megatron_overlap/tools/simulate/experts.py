"""A layer of experts on one rank: dispatch, expert MLPs and combine, in the order of the stock path or of the plugin.

Every rank has as many tokens for each expert. The stock path computes the local experts as one grouped GEMM. The plugin
computes the pieces of `schedules.expert_parallel`, a GEMM for each piece and linear layer, and the weight gradients of
whole experts. Shared experts are computed before dispatch, by the plugin during dispatch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_overlap.autotune.cost_model import TOUCHED, CostModel, Link
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.config.cluster import Elementwise
from megatron_overlap.schedules import Message, Plan, Work
from megatron_overlap.schedules.expert_parallel import ExpertPlan, Segments, expert_plan
from megatron_overlap.tools.simulate.event_simulator import SimulatedRun, Stream, in_order, run_program
from megatron_overlap.tools.simulate.job import Experts
from megatron_overlap.tools.simulate.linear import ANY_CHUNK
from megatron_overlap.tools.simulate.passes import Op


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer on one rank.

    Attributes:
        model: costs.
        experts: shape, ranks and overlap.
        hidden: hidden size of the model.
        swiglu: whether the experts have a gate.
        tokens: of this rank.
    """

    model: CostModel
    experts: Experts
    hidden: int
    swiglu: bool
    tokens: int

    @cached_property
    def group_rows(self) -> int:
        """Rows of one rank for one expert."""
        return max(1, round(self.tokens * self.experts.shape.topk / self.experts.shape.count))

    @property
    def rows(self) -> int:
        """Rows that this rank sends, and rows that its experts compute."""
        return self.group_rows * self.experts.shape.count

    def moved_us(self, rows: int) -> float:
        """Time to read and write rows in all."""
        return self.model.memory_us(rows * self.hidden * self.model.item_bytes)

    def router_us(self, *, backward: bool) -> float:
        """The GEMMs of the router."""
        count = self.experts.shape.count
        if not backward:
            return self.model.gemm_us(self.tokens, count, self.hidden)
        return self.model.gemm_us(self.tokens, self.hidden, count) + self.model.gemm_us(count, self.hidden, self.tokens)

    def activation_us(self, rows: int, *, backward: bool) -> float:
        """Between both linear layers of an expert."""
        kind: Elementwise = "swiglu" if self.swiglu else "gelu"
        touched = TOUCHED[kind][backward] * rows * self._width * self.model.item_bytes
        return self.model.memory_us(touched, kind, backward=backward)

    def grouped_us(self, *, backward: bool) -> float:
        """All local experts of the stock path: their tiles together fill the device."""
        local, rows = self.experts.local, self.rows
        weights = self.model.memory_us(local * self._columns * self.hidden * self.model.item_bytes)
        times = (self.model.gemm_us(rows, *reversed(each) if backward else each) for each in self._shapes)
        gemms = sum(max(weights, each) for each in times)
        if backward:
            gemms += sum(self.model.gemm_us(local * n, k, rows // local) for n, k in self._shapes)
        return gemms + self.activation_us(rows, backward=backward)

    def pieces_us(self, segments: Segments, *, backward: bool) -> float:
        """Rows of a chunk: output, or input gradient."""
        return sum(self._piece_us(segment.rows, backward) for segment in segments)

    def _piece_us(self, rows: int, backward: bool) -> float:
        gemms = sum(self.model.gemm_us(rows, *reversed(each) if backward else each) for each in self._shapes)
        return gemms + self.activation_us(rows, backward=backward)

    def wgrad_us(self) -> float:
        """The weight gradients of one whole expert."""
        rows = self.rows // self.experts.local
        return self.model.gemm_us(self._columns, self.hidden, rows) + self.model.gemm_us(self.hidden, self._width, rows)

    def link(self, peer: int) -> Link:
        """The link from rank 0 to a peer."""
        size, near = self.experts.parallel, min(self.experts.parallel, self.model.profile.devices_per_node)
        return self.model.link(near if peer < near else size)

    def stretch(self, peer: int) -> float:
        """Transfer time of a message from rank 0, relative to one between nodes."""
        return self.model.link(self.experts.parallel).copy_rate / self.link(peer).copy_rate

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of both weights of an expert."""
        return ((self._columns, self.hidden), (self.hidden, self._width))

    @property
    def _width(self) -> int:
        return self.experts.shape.ffn_hidden_size

    @property
    def _columns(self) -> int:
        return self._width * (2 if self.swiglu else 1)


def expert_ops(layer: ExpertLayer, shared: Sequence[Op], backward: bool) -> Sequence[Op]:
    """The operations in place of an MLP; `shared` are those of the shared experts."""
    name = " grad" if backward else ""
    ends = [
        Op(f"router{name}", layer.router_us(backward=backward)),
        Op(f"permute{name}", layer.moved_us(2 * layer.rows) + layer.moved_us(layer.rows + layer.tokens)),
    ]
    if _overlaps(layer):
        played = _played(layer, sum(op.time_us for op in shared), backward)
        tensor_us = sum(op.tensor_us for op in shared)
        enqueue_us = _enqueue_us(layer, played) + sum(op.enqueue_us for op in shared)
        experts = Op(f"experts{name}", played.time_us, tensor_us, expert_us=played.exposed_us, enqueue_us=enqueue_us)
        return *ends, experts
    return *ends, *shared, *_stock_ops(layer, backward)


def _stock_ops(layer: ExpertLayer, backward: bool) -> Sequence[Op]:
    name = " grad" if backward else ""
    experts = Op(f"experts{name}", layer.grouped_us(backward=backward))
    if layer.experts.parallel == 1:
        return (experts,)
    num_bytes = layer.rows * layer.hidden * layer.model.item_bytes
    move_us = layer.model.all_to_all_us(num_bytes, layer.experts.parallel)
    # Rows of several experts are sorted by expert after dispatch, and by rank before combine.
    sort = Op(f"sort{name}", 2 * layer.moved_us(2 * layer.rows) if layer.experts.local > 1 else 0.0)
    moves = [Op(f"{each}{name}", move_us, expert_us=move_us) for each in ("dispatch", "combine")]
    return moves[0], sort, experts, moves[1]


@lru_cache(maxsize=1024)
def _overlaps(layer: ExpertLayer) -> bool:
    overlap = layer.experts.overlap
    if overlap != "auto" or layer.experts.parallel == 1:
        return overlap != "none" and layer.experts.parallel > 1
    stock_us = sum(op.time_us for backward in (False, True) for op in _stock_ops(layer, backward))
    runs = [_played(layer, 0.0, backward) for backward in (False, True)]
    return sum(max(run.time_us, _enqueue_us(layer, run)) for run in runs) < (1 - MARGIN) * stock_us


def _enqueue_us(layer: ExpertLayer, run: SimulatedRun) -> float:
    """Host time of the messages of a pass."""
    return run.num_messages * layer.model.enqueue_us


@lru_cache(maxsize=1024)
def _played(layer: ExpertLayer, filler_us: float, backward: bool) -> SimulatedRun:
    """The pass of the plugin, with computation of `filler_us` during dispatch."""
    experts, model = layer.experts, layer.model
    counts = [[layer.group_rows] * experts.local] * experts.parallel
    filler_rows = layer.tokens * experts.shape.shared / experts.shape.ffn_hidden_size
    plan = expert_plan(0, counts, counts, filler_rows=filler_rows)
    messages, work, times = list(plan.transfers), list[Work](), list[float]()

    def compute(time_us: float, needs: tuple[int, ...] = ()) -> None:
        work.append(Work((ANY_CHUNK,), needs=needs))
        times.append(time_us)

    compute(filler_us)
    own, half = list(plan.own), len(plan.messages)
    for index, message in enumerate(plan.messages):
        while len(plan.own) - len(own) < message.own_before:
            compute(layer.pieces_us(own.pop(0).rows, backward=backward))
        compute(layer.pieces_us(message.received, backward=backward), (index,))
        messages[half + index] = replace(messages[half + index], after_work=len(work))
    for piece in own:
        compute(layer.pieces_us(piece.rows, backward=backward))
    for _ in range(experts.local if backward else 0):
        compute(layer.wgrad_us())
    compute(0.0, tuple(range(half, 2 * half)))
    stream = _stream(layer, plan, messages, work, times)
    return run_program(in_order(stream), model, model.link(experts.parallel), "message" if model.on_device else "copy")


def _stream(
    layer: ExpertLayer, plan: ExpertPlan, messages: Sequence[Message], work: Sequence[Work], times: Sequence[float]
) -> Stream:
    row_bytes = layer.hidden * layer.model.item_bytes
    sent = [sum(segment.rows for segment in message.sent) for message in plan.messages]
    back = [sum(segment.rows for segment in message.received) for message in plan.messages]
    peers = [message.to for message in plan.messages] + [message.source for message in plan.messages]
    stream = Stream(
        Plan("all_gather", "serial", plan.num_ranks, 0, 1, tuple(messages), tuple(work)),
        tuple(times),
        (0.0,) * len(times),
        tuple(float(rows * row_bytes) for rows in (*sent, *back)),
        stretch=tuple(layer.stretch(peer) for peer in peers),
    )
    if not layer.model.on_device:
        return stream
    # NCCL's kernels carry the messages, one after another.
    queued_us = tuple(layer.model.nccl_message_us(layer.link(peer)) for peer in peers)
    return replace(stream, latency_us=0.0, queued_us=queued_us)
