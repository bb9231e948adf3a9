"""A layer of experts on one rank: dispatch, expert MLPs and combine, in the order of the stock path or of the plugin.

Every rank has as many tokens for each expert. The stock path computes the local experts as one grouped GEMM. The plugin
computes the steps of `schedules.expert_parallel`, a GEMM for each step, expert and linear layer, and the weight
gradients of whole experts. Shared experts are computed before dispatch, by the plugin during dispatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from megatron_overlap.autotune.cost_model import CostModel, Mover
from megatron_overlap.autotune.search import MARGIN
from megatron_overlap.schedules.expert_parallel import (
    ExpertStep,
    RowGroup,
    Segments,
    expert_plan,
    is_one_run,
    rows_by_expert,
)
from megatron_overlap.tools.simulate.event_simulator import SimulatedRun, Stream, Transfer, run_streams
from megatron_overlap.tools.simulate.job import Experts
from megatron_overlap.tools.simulate.passes import Op


@dataclass(frozen=True)
class ExpertLayer:
    """The experts of one layer on one rank, which has so many `tokens` of a `hidden` size."""

    model: CostModel
    experts: Experts
    hidden: int
    swiglu: bool
    tokens: int

    @property
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

    def activation_us(self, rows: int, *, backward: bool) -> float:
        """Between both linear layers of an expert."""
        outputs = rows * self.experts.shape.ffn_hidden_size
        return self.model.elementwise_us("swiglu" if self.swiglu else "gelu", outputs, backward=backward)

    def grouped_us(self, *, backward: bool) -> float:
        """All local experts of the stock path: their tiles together fill the device."""
        local, rows, (columns, hidden) = self.experts.local, self.rows, self._shapes[0]
        weights = self.model.memory_us(local * columns * hidden * self.model.item_bytes)
        gemms = sum(max(weights, each) for each in self._gemms_us(rows, backward))
        if backward:
            gemms += sum(self.model.gemm_us(local * n, k, rows // local) for n, k in self._shapes)
        return gemms + self.activation_us(rows, backward=backward)

    def pieces_us(self, segments: Segments, *, backward: bool) -> float:
        """Rows of a group or of an own piece: output, or input gradient."""
        by_expert = rows_by_expert(segments)
        gemms_us = sum(sum(self._gemms_us(rows, backward)) for rows in by_expert.values())
        return gemms_us + self.activation_us(by_expert.total(), backward=backward)

    def group_us(self, group: RowGroup, received: Segments, *, backward: bool) -> float:
        """Received rows; where they are gathered by expert, with the copies of rows and results."""
        segments = tuple(received[number] for number in group)
        moved = 0 if is_one_run(group) else 4 * sum(segment.rows for segment in segments)
        return self.pieces_us(segments, backward=backward) + self.moved_us(moved)

    def wgrad_us(self) -> float:
        """The weight gradients of one whole expert."""
        return sum(self.model.gemm_us(n, k, self.rows // self.experts.local) for n, k in self._shapes)

    @property
    def _shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of both weights of an expert."""
        width = self.experts.shape.ffn_hidden_size
        return ((width * (2 if self.swiglu else 1), self.hidden), (self.hidden, width))

    def _gemms_us(self, rows: int, backward: bool) -> list[float]:
        """The GEMMs of both linear layers: output, or input gradient."""
        return [self.model.gemm_us(rows, *reversed(each) if backward else each) for each in self._shapes]


def expert_ops(layer: ExpertLayer, shared: Sequence[Op], backward: bool) -> Sequence[Op]:
    """The operations in place of an MLP; `shared` are those of the shared experts."""
    model, tokens, hidden, count = layer.model, layer.tokens, layer.hidden, layer.experts.shape.count
    gemms = [(tokens, hidden, count), (count, hidden, tokens)] if backward else [(tokens, count, hidden)]
    router = Op("router", sum(model.gemm_us(*shape) for shape in gemms))
    permute = Op("permute", layer.moved_us(2 * layer.rows) + layer.moved_us(layer.rows + tokens))
    if not _overlaps(layer):
        return router, permute, *shared, *_stock_ops(layer, backward)
    played = _played(layer, sum(op.time_us for op in shared), backward)
    tensor_us = sum(op.tensor_us for op in shared)
    enqueue_us = played.num_messages * model.enqueue_us + sum(op.enqueue_us for op in shared)
    experts = Op("experts", played.time_us, tensor_us, expert_us=played.exposed_us, enqueue_us=enqueue_us)
    return router, permute, experts


def _stock_ops(layer: ExpertLayer, backward: bool) -> Sequence[Op]:
    experts = Op("experts", layer.grouped_us(backward=backward))
    if layer.experts.parallel == 1:
        return (experts,)
    num_bytes = layer.rows * layer.hidden * layer.model.item_bytes
    move_us = layer.model.all_to_all_us(num_bytes, layer.experts.parallel)
    # Rows of several experts are sorted by expert after dispatch, and by rank before combine.
    sort = Op("sort", 2 * layer.moved_us(2 * layer.rows) if layer.experts.local > 1 else 0.0)
    dispatch, combine = (Op(name, move_us, expert_us=move_us) for name in ("dispatch", "combine"))
    return dispatch, sort, experts, combine


def _overlaps(layer: ExpertLayer) -> bool:
    overlap = layer.experts.overlap
    if overlap != "auto" or layer.experts.parallel == 1:
        return overlap != "none" and layer.experts.parallel > 1
    stock_us = sum(op.time_us for backward in (False, True) for op in _stock_ops(layer, backward))
    runs = [_played(layer, 0.0, backward) for backward in (False, True)]
    enqueue_us = layer.model.enqueue_us
    return sum(max(run.time_us, run.num_messages * enqueue_us) for run in runs) < (1 - MARGIN) * stock_us


@lru_cache(maxsize=1024)
def _played(layer: ExpertLayer, filler_us: float, backward: bool) -> SimulatedRun:
    """The pass of the plugin, with computation of `filler_us` during dispatch."""
    experts, model = layer.experts, layer.model
    counts = [[layer.group_rows] * experts.local] * experts.parallel
    filler_rows = layer.tokens * experts.shape.shared / experts.shape.ffn_hidden_size
    plan = expert_plan(0, counts, counts, filler_rows=filler_rows)
    on_device, link = model.on_device, model.link(experts.parallel)
    # On a device, of a group inside a node unless NCCL is configured.
    mover: Mover = model.mover(link) if experts.copies else "message"
    by_copies, others = on_device and mover == "copy", experts.parallel - 1
    flag_us = link.flag_us if by_copies else 0.0
    near = min(experts.parallel, model.profile.devices_per_node)
    steps = Stream()

    def send(step: ExpertStep, *, dispatch: bool) -> list[int]:
        """Sends the messages of a step, one call of NCCL or of the copy engines."""
        numbers = []
        for k, message in ((k, plan.messages[k]) for k in step.messages):
            segments, peer = (message.sent, message.to) if dispatch else (message.received, message.source)
            num_bytes = sum(segment.rows for segment in segments) * layer.hidden * model.item_bytes
            peer_link, opens_call = model.link(near) if peer < near else link, k == step.messages[0]
            stretch, queued_us = link.copy_rate / peer_link.copy_rate, 0.0
            if not on_device:
                numbers.append(steps.send(Transfer(float(num_bytes), stretch=stretch)))
                continue
            if mover == "copy":
                # Probabilities are copies too. The first copy to each peer waits until its buffer is free.
                queued_us = model.queued_us(link, mover, 1 + (k < others), 1 + (dispatch != backward))
                if not opens_call:
                    queued_us += link.further_us - (link.copy_us or 0.0)
            elif opens_call:
                queued_us = model.queued_us(peer_link, mover)
            call = Transfer(float(num_bytes), 0, None, stretch, 0.0, queued_us, mover, num_messages=int(opens_call))
            numbers.append(steps.send(call))
        return numbers

    for step in plan.steps:
        send(step, dispatch=True)
    steps.compute(filler_us)
    own, combined = list(plan.own), list[int]()
    for step in plan.steps:
        while len(plan.own) - len(own) < step.own_before:
            steps.compute(layer.pieces_us(own.pop(0).rows, backward=backward))
        rows_us = sum(layer.group_us(group, plan.received, backward=backward) for group in step.received)
        steps.compute(len(step.messages) * flag_us + rows_us, *step.messages)
        combined += send(step, dispatch=False)
    for piece in own:
        steps.compute(layer.pieces_us(piece.rows, backward=backward))
    steps.compute(layer.moved_us(2 * layer.rows))  # the rows in order of the experts
    for _ in range(experts.local if backward else 0):
        steps.compute(layer.wgrad_us())
    for result, message in zip(combined, plan.messages, strict=True):
        rows = sum(segment.rows for segment in message.sent) if by_copies else 0
        steps.compute(flag_us + layer.moved_us(2 * rows), result)
    return run_streams([steps], model, link)
