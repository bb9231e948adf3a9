"""Expert parallelism inside one micro-batch: overlapped dispatch, expert MLPs and combine."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import batched, chain, starmap
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap.comm import Transport
from megatron_overlap.ops.call import Observer, transport_for, unobserved
from megatron_overlap.ops.expert_parallel.exchange import ExpertPass, Rows
from megatron_overlap.ops.expert_parallel.experts import Activated, MLPExperts
from megatron_overlap.schedules.expert_parallel import Counts, ExpertPlan, Segments, expert_plan
from megatron_overlap.schedules.heuristics import MIN_CHUNK_ROWS


class ExpertOptions(NamedTuple):
    """Options of one call; the same on every rank of the group.

    Attributes:
        parts: chunks of each pair of ranks; None uses `schedules.expert_parallel.max_parts`.
        min_rows: rows of the smallest chunk.
        compute_per_message: see `expert_plan`.
        filler_rows: computation of `filler` in expert rows; places the own rows.
        fixed_order: the plan alone places the own rows. Results do not depend on it.
        schedule: `direct`; or `serial`: the same messages without overlap.
    """

    parts: int | None = None
    min_rows: int = MIN_CHUNK_ROWS
    compute_per_message: float = 1.0
    filler_rows: float = 0.0
    fixed_order: bool = False
    schedule: Literal["direct", "serial"] = "direct"


def expert_parallel(
    x: torch.Tensor,
    probs: torch.Tensor,
    sent: Counts,
    received: Counts,
    experts: MLPExperts,
    *,
    totals: Counts | None = None,
    group: dist.ProcessGroup | Transport,
    options: ExpertOptions | None = None,
    observer: Observer | None = None,
    filler: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Equals `all_to_all(experts(all_to_all(x), all_to_all(probs)))`.

    An expert computes `activation(rows @ fc1.T, probs) @ fc2.T` of its rows from all ranks, in the order of
    `schedules.expert_parallel`. In backward the weight gradients of whole experts follow, while the last input
    gradients are sent. Every row is computed once, and every weight gradient is one product over all rows of an expert
    in order of the source ranks, so no result depends on the order of arrival.

    Args:
        x: `[T, H]` tokens, sorted by rank and local expert of their destination.
        probs: `[T]` probability of each token, any floating dtype.
        sent: for each rank, the tokens of this rank for each local expert of that rank; sums to T.
        received: for each rank, its tokens for each local expert of this rank.
        experts: MLPs of this rank.
        totals: for each rank, the tokens that it sends to each rank. Copy engines need them, other transports do not.
        group: the ranks, or their transport.
        options: number of messages and order; the same on every rank. None uses `ExpertOptions()`.
        observer: called after every pass.
        filler: called while the first tokens are sent; with the serial schedule, when they are received. In backward,
            autograd computes the gradients of what it computed in the same place.

    Returns:
        `[T, H]`, dtype of `x`: the result of each token.

    Raises:
        ValueError: shapes, dtypes or counts do not fit each other.
        TransportError: a peer has failed or exceeds the deadline.
    """
    transport = transport_for(group)
    options = options or ExpertOptions()
    if len(sent) != transport.size:
        raise ValueError(f"sent: counts for {len(sent)} ranks: the group has {transport.size}")
    plan = expert_plan(
        transport.rank,
        sent,
        received,
        totals=totals,
        parts=options.parts,
        min_rows=options.min_rows,
        compute_per_message=options.compute_per_message,
        filler_rows=options.filler_rows,
    )
    weight = experts.fc1[0].weight
    if x.dim() != 2 or x.shape != (plan.num_tokens, weight.shape[1]) or probs.shape != x.shape[:1]:
        raise ValueError(
            f"x: shapes {tuple(x.shape)} and {tuple(probs.shape)} of probs do not fit {plan.num_tokens} tokens and a "
            f"weight of shape {tuple(weight.shape)}"
        )
    if len(plan.experts) != len(experts.fc1):
        raise ValueError(f"sent: counts for {len(plan.experts)} experts: this rank has {len(experts.fc1)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(f"x: {x.dtype} on {x.device} does not fit a weight of {weight.dtype} on {weight.device}")
    needs_grad = torch.is_grad_enabled() and any(each.requires_grad for each in (x, probs, *experts.weights))
    # Hooks, as those of recomputation without reentry, may replace a saved tensor, and its graph would be lost.
    keep_output = needs_grad and not experts.recompute and not _saved_tensors_have_hooks()
    order = options.fixed_order or x.is_cuda, options.schedule == "serial"
    call = _Call(transport, plan, experts, probs.dtype, *order, needs_grad, keep_output, observer or unobserved)
    begun = _Begin.apply(x, probs, call, *experts.weights)
    if filler is not None:
        filler()
    return _Finish.apply(begun, call)


def _saved_tensors_have_hooks() -> bool:
    """Whether `torch.autograd.graph.saved_tensors_hooks` is or may be active; torch has no public function for it."""
    active = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return active is None or active(True) is not None


@dataclass(slots=True)
class _Call:
    transport: Transport
    plan: ExpertPlan
    experts: MLPExperts
    probs_dtype: torch.dtype
    fixed_order: bool
    serial: bool
    needs_grad: bool
    keep_output: bool
    observe: Observer
    running: list[tuple[ExpertPass, Rows, dict[Segments, Activated]]] = field(default_factory=list)
    """The pass between its two autograd nodes; in backward the tokens that forward received, and what it activated."""

    def take(self, name: str, width: int, like: torch.Tensor) -> torch.Tensor:
        """A buffer with a row for each expert row."""
        return self.transport.buffer_pool.take(f"expert_{name}", (self.plan.num_rows, width), like)

    def begin(self, op: str, tokens: Rows, results: Rows) -> ExpertPass:
        return ExpertPass(self.transport, self.plan, op, tokens, results, serial=self.serial)

    @property
    def whole(self) -> list[int]:
        """All rows of each expert."""
        return [segment.rows for segment in self.plan.experts]


class _Begin(torch.autograd.Function):
    """First node of a call: begins its forward and finishes its backward. Its output has no elements.

    Autograd first runs nodes that were created later: `_Finish`, then all nodes between both, then this one.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, probs: torch.Tensor, call: _Call, *weights: torch.Tensor) -> torch.Tensor:
        x, probs = x.contiguous(), probs.contiguous()
        results = (torch.empty_like(x),)
        call.running.append((call.begin("expert_parallel", (x, probs), results), (), {}))
        ctx.call = call
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        plan, experts, pool = call.plan, call.experts, call.transport.buffer_pool
        expert_pass, (expert_x,), activated = call.running.pop()
        dx, dprobs = expert_pass.results
        w = experts.fc1[0].weight  # the flight recorder finds the layer by a local variable of this name
        output = call.take("activated", experts.fc2[0].weight.shape[1], dx)
        dhidden, whole = call.take("dhidden", w.shape[0], dx), call.whole

        def compute(rows: Segments, inputs: Rows, outputs: Rows) -> None:
            experts.dgrad(rows, whole, activated.pop(rows), inputs[0], dhidden, output, *outputs)

        expert_pass.run(compute, fixed_order=call.fixed_order)
        expert_dy = expert_pass.expert_rows(call.take("dy", dx.shape[1], dx))
        needed = ctx.needs_input_grad[3:]
        gradients = experts.wgrad(plan.experts, expert_x, dhidden, output, expert_dy, needed, pool)
        expert_pass.finish()
        call.observe("dgrad", expert_pass.send_bytes)
        if any(needed):
            call.observe("wgrad", 0)
        return dx, dprobs, None, *(None if each is None else each.result() for each in gradients)


class _Finish(torch.autograd.Function):
    """Last node of a call: finishes its forward and begins its backward."""

    @staticmethod
    def forward(ctx: Any, begun: torch.Tensor, call: _Call) -> torch.Tensor:
        expert_pass, _, activated = call.running.pop()
        whole = call.whole

        def compute(rows: Segments, inputs: Rows, outputs: Rows) -> None:
            made = call.experts.forward(rows, whole, *inputs, *outputs, keep_output=call.keep_output)
            if call.needs_grad:
                activated[rows] = made

        expert_pass.run(compute, fixed_order=call.fixed_order)
        ctx.call = call
        # Recomputation expects the saved tensors of a call in one order, whatever the order of arrival.
        ctx.computed = sorted(activated)
        if call.needs_grad:
            saved = chain.from_iterable(activated[rows] for rows in ctx.computed)
            ctx.save_for_backward(expert_pass.expert_rows(), *saved)
        expert_pass.finish()
        call.observe("forward", expert_pass.send_bytes)
        return expert_pass.results[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        dy, (expert_x, *saved) = grads[0].contiguous(), ctx.saved_tensors
        activated = dict(zip(ctx.computed, starmap(Activated, batched(saved, 3)), strict=True))
        results = torch.empty_like(dy), dy.new_empty(call.plan.num_tokens, dtype=call.probs_dtype)
        call.running.append((call.begin("expert_parallel dgrad", (dy,), results), (expert_x,), activated))
        return dy.new_empty(0), None
