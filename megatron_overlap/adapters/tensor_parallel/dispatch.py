"""Selects the backend of each call of a tensor-parallel linear layer, and runs it.

Order of selection: the stock path where `eligibility` names a reason; the backend that batch overlap assigned to the
layer; the autotuner with `method: auto`; else the configured method, fused or p2p. In a step of the reference check the
selected operation is compared with its reference. A call that a CUDA graph captures is neither measured nor checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport, open_transport
from megatron_overlap.adapters.diagnostics.reference_check import Check
from megatron_overlap.adapters.tensor_parallel import eligibility
from megatron_overlap.adapters.tensor_parallel.autotune import LinearAutotuner
from megatron_overlap.adapters.tensor_parallel.call import LayerOutput, LinearCall, LinearHooks
from megatron_overlap.adapters.tensor_parallel.forward_only import is_forward_only
from megatron_overlap.adapters.tensor_parallel.layer_handoff import LayerHandoff
from megatron_overlap.adapters.wrapping import replaced
from megatron_overlap.autotune.candidates import FUSED, HOPPER, STOCK, Candidate
from megatron_overlap.comm import Transport
from megatron_overlap.counters import SymmetricMemory
from megatron_overlap.ops import LinearPlan
from megatron_overlap.ops.numerics_check import Subject, checked_linear
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan, Hopper
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod, FusedTransport, inside_host, open_fused
from megatron_overlap.ops.tensor_parallel.linear import LINEAR_OPS
from megatron_overlap.ops.tensor_parallel.part_messages import PartGathers
from megatron_overlap.ops.tensor_parallel.tree_sum import unsupported_reason as unsupported_tree_reason
from megatron_overlap.ops.wgrad import DeferredWgrad
from megatron_overlap.schedules.heuristics import Knob
from megatron_overlap.schedules.plan import Pattern
from megatron_overlap.session import Adapter, Session

EMBEDDING = "VocabParallelEmbedding"
_NOT_OVERLAPPED = {
    EMBEDDING: "it has no GEMM to overlap its all-reduce or reduce-scatter with",
    "VocabParallelCrossEntropy": "it sums a few numbers per token, not rows",
}


class LinearAdapter(Adapter):
    """Backends, transports and counters of the tensor-parallel linear layers of one session.

    Attributes:
        splits_queries: attention and its output projection run by slices of queries.
        plan: how the p2p backend cuts and orders messages.
        serial: the configured schedule overlaps nothing; a baseline for measurements.
        tp_invariant: a layer has the same bits on 1, 2 and 4 ranks: one rank runs the operations of the plugin too.
        deferred_wgrad: postponed weight gradients of layers without sequence parallelism.
        assigned: what runs the calls of a layer in batch overlap, for the time of one call.
        split: how transformer layers are divided now: `none`, `batch` or `sequence`.
        layer_handoff: outputs that transformer layers complete inside the next layer.
        transports: the open transports of whole micro-batches, by group.
    """

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._counters = session.counters
        tensor, deterministic = session.config.tensor, session.config.deterministic
        # On the CPU a ring asks which messages are complete. A deterministic run must not depend on that.
        auto: Pattern | None = "direct" if deterministic else None
        pattern: Pattern | None = auto if tensor.schedule == "auto" else tensor.schedule
        self.fused, self.splits_queries = tensor.method == "fused", tensor.attention == "query_split"
        self.plan = LinearPlan(
            pattern=pattern,
            chunks_per_rank=None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank,
            add_in_place=True if deterministic else None,
            tree=session.config.deterministic == "tp_invariant",
        )
        self.serial, self.tp_invariant = self.plan.pattern == "serial", self.plan.tree
        self.deferred_wgrad = DeferredWgrad()
        self.assigned: dict[torch.nn.Module, Callable[[LinearCall], LayerOutput]] = {}
        self._unread: torch.nn.Module | None = None
        self.split = self._configured_split = "none" if tensor.split == "auto" else tensor.split
        self.layer_handoff = LayerHandoff()
        self.check = session.adapter(Check)
        self.transports: dict[dist.ProcessGroup, Transport] = {}
        self._part_gathers: dict[dist.ProcessGroup, PartGathers | None] = {}
        self._hooks: dict[tuple[str, str, torch.Size, bool], LinearHooks] = {}
        self._fused_transports = FusedTransports(session)
        self._p2p = P2PBackend(self, self.plan)
        self._fused = FusedBackend(self._fused_transports)
        self.autotuner = LinearAutotuner(session, self.run_candidate, self._fused.candidates, self.transport)
        self._method: OverlapBackend = self._fused if self.fused else self._p2p
        self._backend = cache(self._new_backend)
        self._unlisted = dict(_NOT_OVERLAPPED)

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """The transport of a tensor-parallel group; closed with the session. The first call is collective."""
        transport = self.transports.get(group)
        if transport is None:
            # The tree of sums is over all ranks of a group, and not over those of a host.
            transport = open_device_transport(self.session, group, over_nodes=not self.tp_invariant)
            self.transports[group] = transport
        return transport

    def part_gathers(self, group: dist.ProcessGroup) -> PartGathers | None:
        """The all-gathers of the parts by copy engines; None where the group has none."""
        if group not in self._part_gathers:
            transport = self.transport(group)
            self._part_gathers[group] = PartGathers(transport) if transport.copy_engines else None
        return self._part_gathers[group]

    def hooks(self, kind: str, op: str, x: torch.Tensor, weight: torch.Tensor) -> LinearHooks:
        """The counters of a kind of layer; forward-only calls have their own."""
        key = kind, op, weight.shape, is_forward_only(x, weight)
        hooks = self._hooks.get(key)
        if hooks is None:
            site = kind, f"{weight.shape[1]}->{weight.shape[0]}", op
            hooks = self._hooks[key] = LinearHooks(self._counters, site, key[-1])
        return hooks

    def count_embedding(self, direction: Any, num_bytes: int) -> None:
        """Counts a pass of one part of the embedding, which the first layer overlaps, and the bytes that were sent."""
        for modules in (self._unlisted, self._counters.excluded):
            modules.pop(EMBEDDING, None)
        self._counters.overlapped("embedding", EMBEDDING, "reduce_scatter", direction, num_bytes)

    def unsupported_reason(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, op: str
    ) -> str | None:
        """The reason that an operation on these tensors runs the stock path; None if it is overlapped."""
        if op in ("gemm_ar", "copy_gemm") and self.plan.pattern == "ring":
            return "schedule ring has no all-reduce: use direct, or --sequence-parallel"
        if self.plan.tree:
            gathers = op == "ag_gemm"
            num_rows = x.numel() // weight.shape[1] * (group.size() if gathers else 1)
            row_bytes = weight.shape[1 if gathers else 0] * x.itemsize
            fewest = self.plan.fewest_rows(op, group.size(), num_rows, row_bytes, x.device)
            # The GEMM of row-parallel forward, or of column-parallel dgrad.
            depth = weight.shape[0 if op in ("ag_gemm", "copy_gemm") else 1]
            if reason := unsupported_tree_reason(group.size(), depth, fewest):
                return reason
        if self.check.fallbacks and (reason := self.check.fallbacks.get(_check_name(op, weight))):
            return reason
        return eligibility.unsupported_tensors_reason(x, weight, group)

    def run(self, call: LinearCall, layer_reason: str | None) -> LayerOutput:
        """Runs `call` on the selected backend, or the stock path if its layer has a reason."""
        if self._unlisted and call.group.size() > 1:
            # Modules of one tensor-parallel rank do not communicate.
            self._counters.excluded = self._unlisted | self._counters.excluded
            self._unlisted = {}
        reason = layer_reason or self._p2p.unsupported_reason(call)
        if reason is not None:
            call.hooks.fallback(reason)
            return call.run_stock()
        if eligibility.is_capturing(call.x):
            return self._run_captured(call)
        if call.layer is self._unread:
            call = replace(call, skip_output=True)
        if run := self.assigned.get(call.layer):
            return run(call)
        if call.op == "copy_gemm" and call.hooks.forward_only and not self.plan.tree:
            self.autotuner.add_small(call, math.inf)
            return call.run_not_communicating()
        if self.autotuner.enabled:
            if (reason := self.autotuner.unsupported_reason(call)) is None:
                return self.autotuner.run(call)
            self._counters.exclude("autotuning", reason)
        return self.run_overlapped(call, self._method)

    def _run_captured(self, call: LinearCall) -> LayerOutput:
        """Runs a call that a CUDA graph captures. A capture forbids to synchronise, as measurements and checks do."""
        backend = self._method
        if self.autotuner.enabled:
            candidate = self.autotuner.selected(call)
            if candidate == STOCK:
                return _run_stock(call)
            backend = self._backend(candidate)
        reason = backend.unsupported_capture_reason(call)
        if reason is not None:
            call.hooks.fallback(reason)
            return call.run_stock()
        return call.result(backend.output(call.normalized()))

    def run_overlapped(self, call: LinearCall, backend: OverlapBackend) -> LayerOutput:
        """Runs `call` on `backend`; p2p where fused kernels do not support the call."""
        if call.norm is not None:
            call = call.normalized()
        if isinstance(backend, FusedBackend) and (reason := backend.unsupported_reason(call)) is not None:
            self._counters.not_fused(*call.hooks.site, call.hooks.forward, reason)
            backend = self._p2p
        if self.check.enabled and self.check.due:
            return self._run_checked(call, backend)
        return call.result(backend.output(call))

    def _run_checked(self, call: LinearCall, backend: OverlapBackend) -> LayerOutput:
        """Runs `call` on `backend` and on the reference operation, and compares forward and backward."""
        judge = partial(self.check.judge, _check_name(call.op, call.weight), call.group, call.x.device)
        subject = Subject(call.op, call.group, self.check.rtol, judge, call.main_grad, call.weight_done)

        def overlapped(
            x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, main_grad: torch.Tensor | None
        ) -> torch.Tensor:
            copied = replace(call, x=x, weight=weight, bias=bias, main_grad=main_grad, weight_done=None)
            return backend.output(copied, checked=True)

        return call.result(checked_linear(overlapped, call.x, call.weight, call.bias, subject))

    def run_candidate(self, call: LinearCall, candidate: Candidate) -> LayerOutput:
        """Runs `call` with a candidate of the autotuner."""
        return _run_stock(call) if candidate == STOCK else self.run_overlapped(call, self._backend(candidate))

    def _new_backend(self, candidate: Candidate) -> OverlapBackend:
        if candidate.method == "fused":
            return FusedBackend(self._fused_transports, candidate.knobs)
        plan = replace(self.plan, pattern=candidate.pattern, chunks_per_rank=candidate.chunks_per_rank)
        return P2PBackend(self, plan)

    def assign(
        self, layers: Iterable[torch.nn.Module | None], run: Callable[[LinearCall], LayerOutput]
    ) -> AbstractContextManager[None]:
        """Runs the calls of `layers` by `run` inside the context."""
        return replaced(vars(self), assigned={layer: run for layer in layers if layer is not None})

    def unread(self, layer: torch.nn.Module) -> AbstractContextManager[None]:
        """Inside the context no code reads the output of the row-parallel `layer`. The same on every rank."""
        return replaced(vars(self), _unread=layer)

    def step_ended(self) -> None:
        # An exception in a backward pass leaves that pass's values here.
        self.split, self.autotuner.paused = self._configured_split, False
        self._fused_transports.free_replaced()

    def close(self) -> None:
        """Frees the symmetric memory. The session closes the transports."""
        for transports in (self.transports, self._part_gathers):
            transports.clear()
        self._fused_transports.close()

    def drop(self) -> None:
        """Frees the symmetric memory, and forgets the autotuners of the groups."""
        self.step_ended()
        self.autotuner.drop()
        self.close()


class P2PBackend:
    """Runs point-to-point messages between partial GEMMs, by `plan`. Reasons are the same on all ranks of the group."""

    def __init__(self, adapter: LinearAdapter, plan: LinearPlan) -> None:
        self._adapter, self._plan = adapter, plan
        # Calls over transports whose operations can be captured: later ones of the same shapes allocate nothing.
        self._capturable: set[tuple[object, ...]] = set()

    def unsupported_reason(self, call: LinearCall) -> str | None:
        """The reason that this backend cannot run `call`; None if it can."""
        if self._plan.tree and eligibility.is_te_linear(call.layer):
            return "tp_invariant supports local layers: use --transformer-impl local"
        return self._adapter.unsupported_reason(call.x, call.weight, call.group, call.op)

    def unsupported_capture_reason(self, call: LinearCall) -> str | None:
        """The reason that a CUDA graph cannot capture `call`; None if it can."""
        transport = self._adapter.transports.get(call.group)  # it must be open
        if transport is None or not transport.capturable:
            return eligibility.CAPTURED
        return None if _shapes(call) in self._capturable else f"{eligibility.CAPTURED} before a call of the same shape"

    def output(self, call: LinearCall, *, checked: bool = False) -> torch.Tensor:
        """The output of `call.op`. For the reference check (`checked`) no gradient is deferred."""
        transport = self._adapter.transport(call.group)
        if transport.capturable:
            self._capturable.add(_shapes(call))
        options: dict[str, Any] = {"group": transport, "plan": self._plan, "observer": call.hooks.overlapped}
        options |= {"main_grad": call.main_grad, "weight_done": call.weight_done}
        if call.op in ("copy_gemm", "gemm_ar"):
            # A replay must not compute the weight gradient of a layer outside the graph.
            alone = checked or eligibility.is_capturing(call.x) or eligibility.repeats_weights(call.layer)
            options["deferred_wgrad"] = None if alone else self._adapter.deferred_wgrad
        if call.op in ("gemm_rs", "gemm_ar"):
            options["skip_output"] = call.skip_output and not checked
        return LINEAR_OPS[call.op](call.x, call.weight, call.bias, **options)


class FusedTransports:
    """The symmetric memory of each group that has it."""

    def __init__(self, session: Session) -> None:
        self._session, self.hopper = session, session.config.tensor.kernels == "hopper"
        self._transports: dict[dist.ProcessGroup, FusedTransport | str] = {}
        if session.config.tensor.method == "fused":
            session.counters.symmetric_memory = self.memory

    def open(self, group: dist.ProcessGroup) -> FusedTransport | str:
        """The fused transport of `group`, or the reason that it has none. The first call is collective."""
        transport = self._transports.get(group)
        if transport is None:
            messages, timeout_s = partial(open_transport, self._session), self._session.config.timeout_s
            transport = self._transports[group] = open_fused(group, messages, timeout_s=timeout_s)
            self._session.counters.symmetric_memory = self.memory
        return transport

    def memory(self) -> list[SymmetricMemory]:
        """Symmetric memory of each group whose calls ran fused."""
        opened = [(each.size, inside_host(each)) for each in self._transports.values() if not isinstance(each, str)]
        return [
            SymmetricMemory(size, inside.num_bytes, inside.bound_bytes, Hopper.reasons(inside))
            for size, inside in opened
            if inside.num_bytes
        ]

    def free_replaced(self) -> None:
        """Frees the arenas that larger ones have replaced; see `SymmetricBackend.free_replaced`."""
        for transport in self._transports.values():
            if not isinstance(transport, str):
                inside_host(transport).backend.free_replaced()

    def close(self) -> None:
        """Frees the symmetric memory of all groups."""
        for transport in self._transports.values():
            if not isinstance(transport, str):
                transport.close()
        self._transports.clear()


class FusedBackend:
    """Runs GEMM kernels that access the symmetric memory of peers. `knobs` None: the defaults of the kernels."""

    def __init__(self, transports: FusedTransports, knobs: Sequence[Knob] | None = None) -> None:
        self._transports = transports
        if knobs is None:
            knobs = HOPPER.knobs if transports.hopper else ()
        self._plan = FusedPlan(**dict(knobs))  # type: ignore[arg-type]

    def unsupported_reason(self, call: LinearCall) -> str | None:
        rows, ranks = call.x[..., 0].numel(), call.group.size()
        reason = FusedMethod.unsupported_reason(call.x, rows * ranks if call.op == "ag_gemm" else rows, ranks)
        if reason is not None:
            return reason
        transport = self._transports.open(call.group)
        return transport if isinstance(transport, str) else None

    def unsupported_capture_reason(self, call: LinearCall) -> str | None:
        """See `P2PBackend`. Kernels compare flags with the epoch of their call, which a replay would repeat."""
        return f"{eligibility.CAPTURED}: fused kernels cannot be replayed"

    def candidates(self, call: LinearCall) -> list[Candidate]:
        """Candidates of the autotuner. The first call for Hopper kernels tests them on the device."""
        if self.unsupported_reason(call) is not None:
            return []
        hopper = self._transports.hopper and not Hopper.of(inside_host(self._transport(call))).unsupported_reason
        return [FUSED, *([HOPPER] if hopper else [])]

    def output(self, call: LinearCall, *, checked: bool = False) -> torch.Tensor:
        return LINEAR_OPS[call.op](
            call.x,
            call.weight,
            call.bias,
            group=FusedMethod(self._transport(call), self._plan),
            main_grad=call.main_grad,
            weight_done=call.weight_done,
            observer=call.hooks.overlapped,
        )

    def _transport(self, call: LinearCall) -> FusedTransport:
        transport = self._transports.open(call.group)
        assert not isinstance(transport, str)
        return transport


type OverlapBackend = P2PBackend | FusedBackend


def _run_stock(call: LinearCall) -> LayerOutput:
    """Runs the replaced Megatron method because the autotuner selected or measures it."""
    call.hooks.counters.stock_selected(*call.hooks.site, call.hooks.forward)
    return call.run_stock()


def _shapes(call: LinearCall) -> tuple[object, ...]:
    return call.op, call.x.shape, call.x.dtype, call.weight.shape, call.hooks.forward_only


def _check_name(op: str, weight: torch.Tensor) -> str:
    return f"{op} {weight.shape[1]}->{weight.shape[0]}"
