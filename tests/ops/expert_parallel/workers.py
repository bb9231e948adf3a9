"""Worker functions: expert parallelism and its reference on the same routing, forward and backward."""

from __future__ import annotations

import contextlib
import random
import weakref
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import ExpertOptions, MLPExperts, expert_parallel
from megatron_overlap.ops.call import Projection
from tests.helpers import reference
from tests.helpers.late import LateTransport

Routing = list[list[list[int]]]
"""`routing[source][owner][expert]`, the same on every rank."""
Kind = Literal["random", "none", "one token", "all to rank 0", "own rows only", "single rows", "even"]


@dataclass(frozen=True)
class ExpertCase:
    """One call of the layer."""

    kind: Kind = "random"
    experts: int = 2
    hidden: int = 24
    ffn: int = 20
    gated: bool = True
    dtype: torch.dtype = torch.float64
    probs_dtype: torch.dtype | None = None
    main_grad: bool = False
    late: bool = True
    """Messages complete as late as the transport contract allows."""
    options: ExpertOptions | None = ExpertOptions(parts=3, min_rows=64)
    seed: int = 1


def routing_of(case: ExpertCase, size: int) -> Routing:
    draw = random.Random(case.seed)
    routing: Routing = [[[0] * case.experts for _ in range(size)] for _ in range(size)]
    for source in range(size):
        for owner in range(size):
            for expert in range(case.experts):
                routing[source][owner][expert] = {
                    "random": draw.choice([0, 0, 1, 2, 3, 17, 64, 130, 201]),
                    "none": 0,
                    "one token": int((source, owner, expert) == (size - 1, 0, 0)),
                    "all to rank 0": 100 + expert if owner == 0 else 0,
                    "own rows only": 150 * (owner == source),
                    # As many rows as tell GEMM kernels apart, beside a rank that has many.
                    "single rows": 96 if source == 0 else 1 + (expert + source) % 3,
                    "even": 128,
                }[case.kind]
    return routing


class Problem:
    """Data of one rank."""

    def __init__(self, case: ExpertCase, group: dist.ProcessGroup) -> None:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        routing = routing_of(case, size)
        self.case, self.group = case, group
        self.sent, self.received = routing[rank], [routing[source][rank] for source in range(size)]
        self.totals = [[sum(counts) for counts in sent] for sent in routing]
        generator = torch.Generator().manual_seed(100 * case.seed + rank)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        tokens = sum(map(sum, self.sent))
        features = case.ffn * (2 if case.gated else 1)
        self.x, self.dy = draw(tokens, case.hidden).to(case.dtype), draw(tokens, case.hidden).to(case.dtype)
        self.probs = torch.rand(tokens, generator=generator, dtype=torch.float64).to(case.probs_dtype or case.dtype)
        shapes = [(features, case.hidden)] * case.experts + [(case.hidden, case.ffn)] * case.experts
        self.weights = [(draw(*shape) / shape[1] ** 0.5).to(case.dtype) for shape in shapes]

    def activation(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        if self.case.gated:
            gate, up = hidden.chunk(2, dim=-1)
            activated = F.silu(gate) * up
        else:
            activated = F.gelu(hidden)
        return (activated * probs[:, None]).to(hidden.dtype)

    def run(self, function: Any, dtype: torch.dtype | None = None, main_grad: bool = False, **options: Any) -> Any:
        """Output and gradients of x, probs and every weight; `dtype` other than that of the data."""
        cast = (lambda t: t.clone()) if dtype is None else (lambda t: t.to(dtype, copy=True))
        x, probs = (cast(tensor).requires_grad_() for tensor in (self.x, self.probs))
        weights = [cast(weight).requires_grad_() for weight in self.weights]
        wide = torch.float64 if self.case.dtype == torch.float64 else torch.float32
        into = [torch.ones(weight.shape, dtype=wide) if main_grad else None for weight in weights]
        each = [Projection(*pair) for pair in zip(weights, into, strict=True)]
        count = self.case.experts
        experts = MLPExperts(tuple(each[:count]), tuple(each[count:]), self.activation)
        y = function(x, probs, self.sent, self.received, experts, **options)
        y.backward(cast(self.dy))
        gradients = [weight.grad for weight in weights]
        if main_grad:
            assert all(gradient is None for gradient in gradients)
            gradients = [total - 1 for total in into if total is not None]
        return [y.detach(), x.grad, probs.grad, *gradients]

    def names(self) -> list[str]:
        count = self.case.experts
        return ["y", "dx", "dprobs", *(f"dw1.{e}" for e in range(count)), *(f"dw2.{e}" for e in range(count))]


def _transport(case: ExpertCase, group: dist.ProcessGroup) -> Any:
    return LateTransport(group) if case.late else transport_of(group)


def compare_with_reference(group: dist.ProcessGroup, case: ExpertCase, repeats: int = 2) -> list[tuple[str, int]]:
    """In float64, equal to the plain program up to the last bits. Returns the passes and the bytes sent."""
    transport: Any = _transport(case, group)
    passes: list[tuple[str, int]] = []
    for _ in range(repeats):
        problem = Problem(case, group)
        expected = problem.run(reference.expert_parallel, group=group)
        passes = []
        got = problem.run(
            expert_parallel,
            main_grad=case.main_grad,
            group=transport,
            options=case.options,
            observer=lambda name, sent, passes=passes: passes.append((name, sent)),
        )
        for name, result, true in zip(problem.names(), got, expected, strict=True):
            assert torch.isfinite(result).all(), f"{name}: not finite"
            torch.testing.assert_close(result, true, rtol=1e-11, atol=1e-12, msg=lambda text, n=name: f"{n}: {text}")
    if case.late:
        transport.close()
    return passes


def compare_random(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """Random routings, shapes and numbers of messages, the same on every rank."""
    draw = random.Random(seed)
    for index in range(count):
        case = ExpertCase(
            experts=draw.choice([1, 2, 3]),
            gated=draw.random() < 0.5,
            main_grad=draw.random() < 0.3,
            late=index % 2 == 0,
            options=ExpertOptions(
                parts=draw.choice([None, 1, 2, 5]),
                min_rows=draw.choice([64, 128]),
                compute_per_message=draw.choice([0.1, 1.0, 5.0]),
                fixed_order=draw.random() < 0.5,
            ),
            seed=seed * 1000 + index,
        )
        compare_with_reference(group, case, repeats=1)


def compare_rounding(group: dist.ProcessGroup, case: ExpertCase) -> None:
    """The error against float64 is that of the plain program in the same dtype."""
    transport: Any = _transport(case, group)
    problem = Problem(case, group)
    exact = problem.run(reference.expert_parallel, torch.float64, group=group)
    plain = problem.run(reference.expert_parallel, group=group)
    got = problem.run(expert_parallel, main_grad=case.main_grad, group=transport, options=case.options)
    for name, result, alone, true in zip(problem.names(), got, plain, exact, strict=True):
        if not true.numel():
            continue
        error, own = ((value.double() - true).abs().max() for value in (result, alone))
        allowed = 2 * own + 4 * torch.finfo(case.dtype).eps * true.abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    if case.late:
        transport.close()


def bitwise(group: dist.ProcessGroup, case: ExpertCase) -> list[str]:
    """The tensors that are not bitwise equal to those of the plain program."""
    transport: Any = _transport(case, group)
    problem = Problem(case, group)
    plain = problem.run(reference.expert_parallel, group=group)
    got = problem.run(expert_parallel, group=transport, options=case.options)
    if case.late:
        transport.close()
    return [n for n, a, b in zip(problem.names(), got, plain, strict=True) if not torch.equal(a, b)]


class _NotedTransport(LateTransport):
    """Notes when a pass begins, and with `messages` when its tokens are received and its results may be sent."""

    def __init__(self, group: dist.ProcessGroup, events: list[str], *, messages: bool) -> None:
        super().__init__(group)
        self._events, self._messages = events, messages

    def begin(self, transfers: Any, op: str) -> Any:
        self._events.append(op)
        work = super().begin(transfers, op)
        if self._messages:
            wait, mark_ready, dispatch = work.wait, work.mark_ready, set(range(len(transfers) // 2))

            def noted_wait(*messages: int) -> None:
                if not dispatch.isdisjoint(messages):
                    dispatch.difference_update(messages)
                    self._events.append("received")
                wait(*messages)

            def noted_mark_ready(work_done: int) -> None:
                self._events.append("results")
                mark_ready(work_done)

            work.wait, work.mark_ready = noted_wait, noted_mark_ready  # type: ignore[method-assign]
        return work


def filler_order(group: dist.ProcessGroup, schedule: Literal["direct", "serial"]) -> list[str]:
    """The order of messages, filler and experts in both passes, without repetitions."""
    problem, events, options = Problem(ExpertCase("even"), group), list[str](), ExpertOptions(schedule=schedule)
    transport = _NotedTransport(group, events, messages=schedule == "serial")
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    activation, made = problem.activation, list[torch.Tensor]()

    def noted(*args: torch.Tensor) -> torch.Tensor:
        events.append("experts")
        output = activation(*args)
        output.register_hook(lambda _: events.append("experts"))
        return output

    def filler() -> None:
        events.append("filler")
        made.append(x.exp())
        made[0].register_hook(lambda _: events.append("filler"))

    def with_filler(*args: Any) -> torch.Tensor:
        return expert_parallel(*args, group=transport, options=options, filler=filler) + made[0].sum()

    problem.activation = noted  # type: ignore[method-assign]
    problem.run(with_filler)
    transport.close()
    return [event for event, _ in groupby(events)]


def orders_agree(group: dist.ProcessGroup, case: ExpertCase) -> bool:
    """Whether results are bitwise equal for a late transport, a fast one, and a fixed order."""
    problem, late = Problem(case, group), LateTransport(group)
    runs = [
        problem.run(expert_parallel, group=transport, options=ExpertOptions(3, 64, fixed_order=fixed))
        for transport, fixed in ((late, False), (transport_of(group), False), (transport_of(group), True))
    ]
    late.close()
    return all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


def compare_recomputation(group: dist.ProcessGroup, reentrant: bool) -> bool:
    """Whether results are bitwise equal with activation recomputation."""
    problem = Problem(ExpertCase("random"), group)

    def again(x: torch.Tensor, probs: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = checkpoint(
            lambda x, probs: expert_parallel(x, probs, *rest, **options), x, probs, use_reentrant=reentrant
        )
        return result

    plain, recomputed = (problem.run(function, group=group) for function in (expert_parallel, again))
    return all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


def activation_calls(group: dist.ProcessGroup, recompute: bool, hooks: bool) -> list[int]:
    """How often forward and backward compute the activation."""
    problem, calls = Problem(ExpertCase("even"), group), list[int]()

    def counted(*args: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return problem.activation(*args)

    each = [Projection(weight) for weight in problem.weights]
    experts = MLPExperts(tuple(each[:2]), tuple(each[2:]), counted, recompute)
    x = problem.x.clone().requires_grad_()
    pair = (torch.Tensor.clone, torch.Tensor.clone)
    with torch.autograd.graph.saved_tensors_hooks(*pair) if hooks else contextlib.nullcontext():
        y = expert_parallel(x, problem.probs, problem.sent, problem.received, experts, group=group)
    forward = len(calls)
    y.backward(problem.dy)
    return [forward, len(calls) - forward]


def live_activations(group: dist.ProcessGroup, needs_grad: bool) -> tuple[int, int]:
    """The largest number of inputs of the activation that exist at once in a forward, and how many it computes."""
    problem, inputs, live = Problem(ExpertCase("even"), group), list[weakref.ref[torch.Tensor]](), list[int]()

    def noted(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        inputs.append(weakref.ref(hidden))
        live.append(sum(each() is not None for each in inputs))
        return problem.activation(hidden, probs)

    weights = [Projection(weight.clone().requires_grad_(needs_grad)) for weight in problem.weights]
    experts = MLPExperts(tuple(weights[:2]), tuple(weights[2:]), noted)
    expert_parallel(problem.x, problem.probs, problem.sent, problem.received, experts, group=group)
    return max(live), len(live)


def saved_elements(group: dist.ProcessGroup) -> tuple[list[int], int]:
    """Elements of the tensors saved for backward where hooks pack them, and expert rows."""
    problem = Problem(ExpertCase("even", dtype=torch.float32), group)
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    def forward(*args: Any, **options: Any) -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return expert_parallel(*args, **options)

    problem.run(forward, group=group)
    return saved, sum(map(sum, problem.received))


def frozen_weight(group: dist.ProcessGroup) -> list[bool]:
    """Whether each `main_grad` gets the gradient that it has without a frozen weight; the first weight is frozen."""
    problem = Problem(ExpertCase("even"), group)
    expected = problem.run(expert_parallel, group=group)[3:]
    weights = [weight.clone().requires_grad_(index > 0) for index, weight in enumerate(problem.weights)]
    main_grads = [torch.zeros_like(weight) for weight in problem.weights]
    each = list(map(Projection, weights, main_grads))
    experts = MLPExperts(tuple(each[:2]), tuple(each[2:]), problem.activation)
    y = expert_parallel(
        problem.x.clone().requires_grad_(), problem.probs, problem.sent, problem.received, experts, group=group
    )
    y.backward(problem.dy)
    return [torch.equal(main_grad, true) for main_grad, true in zip(main_grads, expected, strict=True)]


def frozen_passes(group: dist.ProcessGroup) -> list[str]:
    """The passes of a layer whose weights are all frozen."""
    problem, passes = Problem(ExpertCase("even"), group), list[str]()
    frozen = [Projection(weight) for weight in problem.weights]
    experts = MLPExperts(tuple(frozen[:2]), tuple(frozen[2:]), problem.activation)
    x = problem.x.clone().requires_grad_()
    y = expert_parallel(
        x,
        problem.probs,
        problem.sent,
        problem.received,
        experts,
        group=group,
        observer=lambda name, _: passes.append(name),
    )
    y.backward(problem.dy)
    return passes


def second_backward(group: dist.ProcessGroup) -> list[bool]:
    """Whether a second backward pass through a retained graph gives the same gradients of the tokens and weights."""
    problem = Problem(ExpertCase("random"), group)
    weights = [weight.clone().requires_grad_() for weight in problem.weights]
    experts = MLPExperts(*(tuple(map(Projection, part)) for part in (weights[:2], weights[2:])), problem.activation)
    leaves = [problem.x.clone().requires_grad_(), problem.probs.clone().requires_grad_(), *weights]
    y = expert_parallel(leaves[0], leaves[1], problem.sent, problem.received, experts, group=group)
    first = [gradient.clone() for gradient in torch.autograd.grad(y, leaves, problem.dy, retain_graph=True)]
    second = torch.autograd.grad(y, leaves, problem.dy)
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


def error_messages(group: dist.ProcessGroup) -> list[str]:
    """Error messages of calls with arguments that do not fit."""
    problem = Problem(ExpertCase("even"), group)
    x, probs, sent, received = problem.x, problem.probs, problem.sent, problem.received
    each = [Projection(weight) for weight in problem.weights]
    experts = MLPExperts(tuple(each[:2]), tuple(each[2:]), problem.activation)
    fewer = MLPExperts(tuple(each[:1]), tuple(each[2:3]), problem.activation)
    calls: list[tuple[Any, ...]] = [
        (x[1:], probs[1:], sent, received, experts),
        (x, probs[1:], sent, received, experts),
        (x.float(), probs, sent, received, experts),
        (x, probs, sent, received, fewer),
        (x, probs, sent[1:], received, experts),
    ]
    messages = []
    for call in calls:
        try:
            expert_parallel(*call, group=group)
        except ValueError as error:
            messages.append(str(error))
    return messages
