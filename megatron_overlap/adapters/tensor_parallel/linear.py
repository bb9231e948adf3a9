"""Megatron's column- and row-parallel linears on the overlapped ops; what does not fit runs Megatron's own path."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.utils import get_tensor_model_parallel_group_if_none

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.diagnostics.reference_check import Check
from megatron_overlap.adapters.tensor_parallel.autotune import LinearAutotuner
from megatron_overlap.adapters.tensor_parallel.fused import FusedChoice
from megatron_overlap.adapters.tensor_parallel.layer_handoff import LayerHandoff
from megatron_overlap.adapters.wrapping import Method, tracing, untraced
from megatron_overlap.autotune.candidates import Candidate
from megatron_overlap.comm import Transport
from megatron_overlap.counters import SavedActivations, SavedSite
from megatron_overlap.ops import LinearPlan, all_gather_linear, copy_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.ops.wgrad import DeferredWgrad
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.schedules.plan import Pattern
from megatron_overlap.session import Adapter, Session

if TYPE_CHECKING:
    from megatron_overlap.adapters.tensor_parallel.batch_overlap import Half

# What ColumnParallelLinear.forward hands over besides input and weight, in the releases read.
_COLUMN_ARGUMENTS = {
    "bias",
    "gradient_accumulation_fusion",
    "allreduce_dgrad",
    "sequence_parallel",
    "grad_output_buffer",
    "wgrad_deferral_limit",
    "tp_group",
    "gtp_remat_size",
}

_P2P_OPS: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "copy_gemm": copy_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}
_EXPERT = "expert layer: the token dispatcher communicates, not the layer"
_LEFT = {
    "VocabParallelEmbedding": "there is no GEMM to hide its all-reduce or reduce-scatter under",
    "VocabParallelCrossEntropy": "it sums a few numbers a token, not rows",
}


class LinearAdapter(Adapter):
    """What the patched layers of one session share: the plan of each call, transports, and counting."""

    def __init__(self, session: Session) -> None:
        self._session = session
        tensor, deterministic = session.config.tensor, session.config.deterministic
        # A ring on the CPU overlaps by asking what has landed, which is what a deterministic run never does.
        auto: Pattern | None = "direct" if deterministic else None
        pattern: Pattern | None = auto if tensor.schedule == "auto" else tensor.schedule
        self._plan = LinearPlan(
            pattern=pattern,
            chunks_per_rank=None if tensor.chunks_per_rank == "auto" else tensor.chunks_per_rank,
            save_gathered=tensor.recompute_gather == "never",
            add_in_place=True if deterministic else None,
        )
        self._deferred_wgrad = DeferredWgrad()
        self.half: Half | None = None
        self.layer_handoff = LayerHandoff()
        self.check = Check.of(session)
        self.fused = FusedChoice(session, self.transport)
        self.autotuner = LinearAutotuner(session)
        session.counters.saved_activations = SavedActivations(gathered=self._plan.save_gathered)
        for module, reason in _LEFT.items():
            session.counters.exclude(module, reason)

    @classmethod
    def of(cls, session: Session) -> LinearAdapter:
        """The adapter of `session`; made by the first call."""
        return session.adapter(cls)

    def transport(self, group: dist.ProcessGroup) -> Transport:
        """The transport of a tensor-parallel group; closed with the session."""
        return open_transport(self._session, group)

    def close(self) -> None:
        """Closes the symmetric memory; the session closes the transports."""
        self.fused.close()

    def drop(self) -> None:
        """Closes them, and forgets the weight gradients of a backward pass that will not end."""
        self._deferred_wgrad = DeferredWgrad()
        self.close()

    @property
    def serial(self) -> bool:
        """Whether nothing is to be hidden, to measure against."""
        return self._plan.pattern == "serial"

    def options(self, kind: str, op: str, weight: torch.Tensor, fused_wgrad: bool) -> dict[str, Any]:
        """Keyword arguments of an op: the plan, where the weight gradient goes, and who counts."""
        name = f"{weight.shape[1]}->{weight.shape[0]}"
        counters = self._session.counters

        def observer(direction: Any, num_bytes: int) -> None:
            counters.overlapped(kind, name, op, direction, num_bytes)

        options: dict[str, Any] = {"plan": self._plan, "observer": observer}
        if op in ("gemm_ar", "copy_gemm"):
            options["deferred_wgrad"] = self._deferred_wgrad
        if op == "ag_gemm":
            site = SavedSite(kind, name, op)
            options["on_save"] = lambda x, num_bytes: counters.saved_activations.save(
                site, x.data_ptr(), x.nbytes, num_bytes
            )
        if fused_wgrad and weight.requires_grad and hasattr(weight, "main_grad"):
            options["main_grad"] = weight.main_grad
            options["weight_done"] = functools.partial(weight_done_in_main_grad, weight, weight.main_grad)
        return options

    def unsupported_reason(
        self, x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup, op: str
    ) -> str | None:
        """What keeps any layer's tensors, or this session's schedule, from `op`; None if nothing does."""
        if op in ("gemm_ar", "copy_gemm") and self._plan.pattern == "ring":
            return "schedule ring has no all-reduce: use direct, or --sequence-parallel"
        return self.check.unsupported_reason(_call(op, weight)) or _unsupported_tensors_reason(x, weight, group)

    def serve(
        self,
        layer: Any,
        kind: str,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        group: dist.ProcessGroup,
        into: bool,
        own: Callable[[], Any],
        finish: Callable[[torch.Tensor], Any] = lambda output: output,
    ) -> Any:
        """Runs `op` as the config says, or as it is chosen where it says `auto`.

        Args:
            into: the weight gradient goes to main_grad.
            own: Megatron's own path.
            finish: makes what the layer returns of the op's output.
        """
        if self.half is not None:
            options, buffer_pool = self.options(kind, op, weight, into), self.transport(group).buffer_pool
            return finish(self.half.linear(op, x, weight, bias, options, buffer_pool))
        if not self.autotuner.enabled or self.autotuner.unsupported_reason(x, into) is not None:
            return finish(self.linear(kind, op, x, weight, bias, group, into))

        def run(candidate: Candidate) -> Any:
            if candidate.method == "stock":
                self._session.counters.stock_selected(kind, f"{weight.shape[1]}->{weight.shape[0]}", op, "forward")
                return own()
            return finish(self.linear(kind, op, x, weight, bias, group, into, candidate))

        return self.autotuner.run(
            layer,
            kind,
            op,
            x,
            weight,
            group,
            into,
            run,
            lambda: self.fused.ways(op, x, group),
            timed=not self.check.due,
        )

    def linear(
        self,
        kind: str,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Any,
        group: dist.ProcessGroup,
        into: bool,
        candidate: Candidate | None = None,
    ) -> torch.Tensor:
        """Runs `op`: as `candidate` says; without one fused where that is asked for and possible, else p2p."""
        options = self.options(kind, op, weight, into)
        if candidate is not None:
            options["plan"] = replace(self._plan, pattern=candidate.pattern, chunks_per_rank=candidate.chunks_per_rank)
        run = self._runner(kind, op, x, weight, group, candidate)
        if self.check.due:
            return self.check.linear(_call(op, weight), op, x, weight, bias, group, run, options)
        return run(x, weight, bias, **options)

    def _runner(
        self,
        kind: str,
        op: str,
        x: torch.Tensor,
        weight: torch.Tensor,
        group: dist.ProcessGroup,
        candidate: Candidate | None,
    ) -> Callable[..., torch.Tensor]:
        """The op, to be given input, weight, bias and options."""
        wanted = self.fused.wanted if candidate is None else candidate.method == "fused"
        if wanted:
            reason = self.fused.unsupported_reason(op, x, group)
            if reason is None:
                knobs = None if candidate is None else candidate.knobs
                return lambda x, w, bias, **options: self.fused.run(op, x, w, bias, group, knobs, **options)
            self._session.counters.not_fused(kind, f"{weight.shape[1]}->{weight.shape[0]}", op, "forward", reason)
        return functools.partial(_P2P_OPS[op], group=self.transport(group))

    def fall_back(self, kind: str, op: str, weight: torch.Tensor, reason: str) -> None:
        """Counts a call that Megatron's own path serves."""
        self._session.counters.fallback(kind, f"{weight.shape[1]}->{weight.shape[0]}", op, "forward", reason)


def column_forward_impl(original: Method, session: Session) -> Method:
    """Replacement of `ColumnParallelLinear._forward_impl`.

    Equals the original: `all_gather(input) @ weight.T + bias` under sequence parallelism; without it
    `input @ weight.T + bias`, whose input gradient is summed over ranks.
    """
    adapter = LinearAdapter.of(session)
    runs_stock = adapter.autotuner.runs_stock

    @functools.wraps(original)
    def _forward_impl(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not tracing() and adapter.half is None and runs_stock(self, input, weight):
            return original(self, input, weight, *args, **kwargs)
        return served(self, input, weight, *args, **kwargs)

    @untraced
    def served(self: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        group = get_tensor_model_parallel_group_if_none(kwargs.get("tp_group"))
        if group is None or group.size() == 1:
            return original(self, input, weight, *args, **kwargs)
        op = "ag_gemm" if kwargs.get("sequence_parallel") else "copy_gemm"
        reason = _unsupported_column_reason(self, args, kwargs) or adapter.unsupported_reason(input, weight, group, op)
        if reason is not None:
            adapter.fall_back("column", op, weight, reason)
            return original(self, input, weight, *args, **kwargs)
        into = bool(kwargs.get("gradient_accumulation_fusion"))
        own = functools.partial(original, self, input, weight, *args, **kwargs)
        return adapter.serve(self, "column", op, input, weight, kwargs.get("bias"), group, into, own)

    return _forward_impl


def row_forward(original: Method, session: Session) -> Method:
    """Replacement of `RowParallelLinear.forward`.

    Equals the original: `reduce_scatter(input @ weight.T)` under sequence parallelism, without it
    `all_reduce(input @ weight.T)`; then the bias, which is returned instead of added with `skip_bias_add`.
    """
    adapter = LinearAdapter.of(session)
    runs_stock = adapter.autotuner.runs_stock
    own_gemm = RowParallelLinear._forward_impl

    @functools.wraps(original)
    def forward(self: Any, input_: torch.Tensor) -> Any:
        if not tracing() and adapter.half is None:
            # By its name it would be looked for in a call of its own.
            weight = self._parameters.get("weight")
            if weight is not None and runs_stock(self, input_, weight):
                return original(self, input_)
        return served(self, input_)

    @untraced
    def served(self: Any, input_: torch.Tensor) -> Any:
        group = self.tp_group
        if group is None or group.size() == 1:
            return original(self, input_)
        op = "gemm_rs" if self.sequence_parallel else "gemm_ar"
        reason = unsupported_row_reason(self, input_, group, own_gemm) or adapter.unsupported_reason(
            input_, self.weight, group, op
        )
        if reason is not None:
            adapter.fall_back("row", op, self.weight, reason)
            return original(self, input_)

        def finish(output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            if self.skip_bias_add:
                return output, self.bias
            return (output if self.bias is None else output + self.bias), None

        into, own = self.gradient_accumulation_fusion, functools.partial(original, self, input_)
        return adapter.serve(self, "row", op, input_, self.weight, None, group, into, own, finish)

    return forward


def _unsupported_column_reason(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    unknown = sorted(set(kwargs) - _COLUMN_ARGUMENTS)
    if args or unknown:
        return f"arguments that are not known here: {', '.join(unknown) or 'positional'}"
    if layer.explicit_expert_comm:
        return _EXPERT
    if kwargs.get("sequence_parallel") and kwargs.get("allreduce_dgrad"):
        return "sequence parallel together with an all-reduce of dgrad"
    if not kwargs.get("sequence_parallel") and not kwargs.get("allreduce_dgrad"):
        return "the layer does not communicate (disable_grad_reduce)"
    if kwargs.get("grad_output_buffer") is not None:
        return "deferred weight gradient of the embedding (--defer-embedding-wgrad-compute)"
    if kwargs.get("gtp_remat_size", 1) > 1:
        return "generalized tensor parallel weights"
    return None


def _call(op: str, weight: torch.Tensor) -> str:
    return f"{op} {weight.shape[1]}->{weight.shape[0]}"


def unsupported_row_reason(layer: Any, input_: torch.Tensor, group: dist.ProcessGroup, own_gemm: Method) -> str | None:
    if layer.explicit_expert_comm:
        return _EXPERT
    if not layer.input_is_parallel:
        return "input is not parallel"
    if type(layer)._forward_impl is not own_gemm:
        return f"{type(layer).__name__} has a GEMM of its own"
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return "generalized tensor parallel weights"
    context = layer.config._cpu_offloading_context
    if context is not None and context.inside_context is True:
        return "activations are offloaded to the CPU"
    if layer.sequence_parallel and input_.shape[0] % group.size():
        return f"sequence length is not divisible by the tensor-parallel size {group.size()}"
    return None


def _unsupported_tensors_reason(x: torch.Tensor, weight: torch.Tensor, group: dist.ProcessGroup) -> str | None:
    if group.size() > MAX_RANKS:
        return f"more than {MAX_RANKS} tensor-parallel ranks"
    if hasattr(weight, "__fsdp_param__"):
        return "Megatron-FSDP shards the weight"
    if x.dtype != weight.dtype:
        return f"input is {x.dtype}, weight is {weight.dtype}"
    if torch.is_autocast_enabled(x.device.type):
        return "autocast is on"
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    if dist.get_backend(group) not in ("gloo", "nccl"):
        return f"backend {dist.get_backend(group)} has no point-to-point transport here"
    return None


def weight_done_in_main_grad(weight: torch.Tensor, main_grad: torch.Tensor) -> torch.Tensor | None:
    """What autograd gets for a weight whose gradient is in `main_grad`, as Megatron's own fused path returns it.

    Megatron's data-parallel hook runs when autograd hands the weight a gradient, and looks at the flag to know that
    there is nothing left to add.
    """
    weight.main_grad = main_grad
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if getattr(weight, "zero_out_wgrad", False):
        return torch.zeros(main_grad.shape, dtype=weight.dtype, device=weight.device)
    return torch.empty(main_grad.shape, dtype=weight.dtype, device=weight.device)
