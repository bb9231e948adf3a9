"""Replacements of methods of `MoELayer`: one overlapped operation in place of dispatch, experts and combine.

Router, permutation, capacity and auxiliary losses stay Megatron's. So do shared experts, which are computed while the
first tokens are dispatched. Not yet run on several GPUs.

`overlap.expert.method: auto` measures in the training whether a layer runs the stock path or p2p. The routing of a
layer changes in every call, so a kind of call is a layer, whatever its rows.
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport
from megatron_overlap.adapters.expert_parallel.experts import LayerExperts, unsupported_layer_reason
from megatron_overlap.adapters.tensor_parallel.autotune import GroupAutotuners
from megatron_overlap.adapters.wrapping import Method, recomputed_by_torch, untraced, with_globals
from megatron_overlap.autotune.candidates import EXPERTS, STOCK, Call, Candidate
from megatron_overlap.autotune.tuner import Autotuner
from megatron_overlap.ops import ExpertOptions, expert_parallel
from megatron_overlap.session import Adapter, Session

_OP = "expert_parallel"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One `MoELayer`, with its name in the report."""

    name: str
    experts: LayerExperts | None  # None if the layer does not run overlapped
    reason: str | None  # the cause, where it communicates


@dataclass(slots=True)
class _SharedExperts:
    """Input and, once it is computed, output of the shared experts in one call."""

    x: torch.Tensor
    y: torch.Tensor | None = None


class ExpertAdapter(Adapter):
    """Options and counters of the mixture-of-experts layers of one session, and the replacements of their methods."""

    def __init__(self, session: Session) -> None:
        self.session = session
        fixed_order, schedule = bool(session.config.deterministic), session.config.expert.schedule
        self.options = ExpertOptions(fixed_order=fixed_order, schedule=schedule)
        self._overlapped: weakref.WeakSet[Any] = weakref.WeakSet()
        """Layers between their `dispatch` and `combine` that `routed_experts_compute` computes alone."""
        self.stock: dict[str, Method] = {}  # the replaced methods by name
        self.autotuner = GroupAutotuners(session, session.config.expert.method)
        self._calls: dict[tuple[object, ...], Call] = {}
        self._layers: weakref.WeakKeyDictionary[Any, _Layer] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[Any, _SharedExperts] = weakref.WeakKeyDictionary()
        # Of each dispatcher, the tokens of all ranks for each expert in the present call.
        self._counts: weakref.WeakKeyDictionary[Any, torch.Tensor] = weakref.WeakKeyDictionary()

    def preprocess(self, dispatcher: Any, routing_map: torch.Tensor) -> torch.Tensor:
        """Keeps the counts of all ranks, which the replaced method gathers."""
        stock: Any = self.stock["preprocess"]
        name = "gather_from_sequence_parallel_region"

        def gather(*args: Any, **kwargs: Any) -> torch.Tensor:
            counts: torch.Tensor = stock.__globals__[name](*args, **kwargs)
            self._counts[dispatcher] = counts
            return counts

        num_tokens: torch.Tensor = with_globals(stock, {name: gather})(dispatcher, routing_map)
        return num_tokens

    def shared_experts_compute(self, layer: Any, hidden_states: torch.Tensor) -> Any:
        """Returns None where `dispatch` computes them."""
        self._shared.pop(layer, None)
        stock = self.stock["shared_experts_compute"]
        if not layer.use_shared_expert or self._layer(layer).experts is None:
            return stock(layer, hidden_states)
        if layer.shared_experts.use_shared_expert_gate:
            # Their input has two gradients. Stock adds each to that of `hidden_states`, the view below adds their sum.
            return stock(layer, hidden_states)
        # Autograd runs the backward of this view last, so the gradients of `hidden_states` are added in stock order.
        self._shared[layer] = _SharedExperts(hidden_states.view_as(hidden_states))
        return None

    def compute_shared(self, layer: Any) -> None:
        """Computes the postponed shared experts of this call, if it has any."""
        shared = self._shared.get(layer)
        if shared is not None:
            shared.y = self.stock["shared_experts_compute"](layer, shared.x)

    def postprocess(self, layer: Any, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> Any:
        """Adds the shared experts that were computed during dispatch."""
        if shared_expert_output is None and (shared := self._shared.pop(layer, None)) is not None:
            shared_expert_output = shared.y
        return self.stock["postprocess"](layer, output, shared_expert_output)

    def dispatch(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """The identity where `routed_experts_compute` computes the layer."""
        if self.begins(layer, hidden_states):
            return hidden_states, probs
        self.compute_shared(layer)
        return self.stock["dispatch"](layer, hidden_states, probs)

    def combine(self, layer: Any, output: torch.Tensor) -> Any:
        """The identity where `routed_experts_compute` computed the layer."""
        if layer in self._overlapped:
            self._overlapped.discard(layer)
            return output
        return self.stock["combine"](layer, output)

    def begins(self, layer: Any, hidden_states: torch.Tensor) -> bool:
        """Whether `routed_experts_compute` computes this call alone. A fallback is counted."""
        self._overlapped.discard(layer)
        known = self._layer(layer)
        reason = known.reason
        if known.experts is not None:
            reason = known.experts.unsupported_reason(hidden_states, layer.token_dispatcher.ep_group)
            if reason is None:
                self._overlapped.add(layer)
                return True
        if reason is not None:
            self.session.counters.fallback("expert", known.name, _OP, "forward", reason)
        return False

    def _layer(self, layer: Any) -> _Layer:
        known = self._layers.get(layer)
        if known is None:
            config = layer.config
            name = f"{layer.num_local_experts}x{config.hidden_size}->{config.moe_ffn_hidden_size}"
            reason = experts = None
            if layer.token_dispatcher.ep_size == 1:
                self.session.counters.exclude("MoELayer", "one expert-parallel rank: the layer does not communicate")
            else:
                reason = unsupported_layer_reason(layer)
                experts = LayerExperts(layer.experts) if reason is None else None
            known = self._layers[layer] = _Layer(name, experts, reason)
        return known

    def routed_experts_compute(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        """`combine(routed_experts_compute(*dispatch(hidden_states, probs)))` by the selected method."""
        if layer not in self._overlapped:
            return self.stock["routed_experts_compute"](layer, hidden_states, probs)
        if not self.autotuner.enabled:
            return self.compute(layer, hidden_states, probs), None
        if reason := recomputed_by_torch():
            self.session.counters.exclude("autotuning", f"unmeasured p2p runs: {reason}")
            return self.compute(layer, hidden_states, probs), None

        def run(candidate: Candidate) -> torch.Tensor:
            if candidate != STOCK:
                return self.compute(layer, hidden_states, probs)
            self.session.counters.stock_selected("expert", self._layers[layer].name, _OP, "forward")
            dispatched = self.stock["dispatch"](layer, hidden_states, probs)
            # Here their backward precedes that of dispatch, so both candidates are timed with it.
            self.compute_shared(layer)
            output = self.stock["routed_experts_compute"](layer, *dispatched)[0]
            combined: torch.Tensor = self.stock["combine"](layer, output)
            return combined

        autotuner, candidates = self.autotuner.autotuner(layer.token_dispatcher.ep_group), (STOCK, Candidate("p2p"))
        call = self._call(layer, hidden_states, autotuner)
        return autotuner.run(call, run, (hidden_states, probs), lambda: candidates)[0], None

    def _call(self, layer: Any, hidden_states: torch.Tensor, autotuner: Autotuner) -> Call:
        """The kind of a call, the same on every rank."""
        backward = torch.is_grad_enabled() and hidden_states.requires_grad
        # Layers of multi-token prediction have numbers of their own.
        predicts = bool(getattr(layer, "is_mtp_layer", False))
        kind = (layer.token_dispatcher.ep_group, layer.layer_number, predicts, backward, hidden_states.dtype)
        call = self._calls.get(kind)
        if call is None:
            # The ranks may have different numbers of rows.
            rows = int(autotuner.slowest([float(hidden_states.shape[0])])[0])
            sizes = layer.config.hidden_size, layer.config.moe_ffn_hidden_size
            dtype = str(hidden_states.dtype).removeprefix("torch.")
            name = f"{layer.num_local_experts} experts of {'prediction ' * predicts}layer {layer.layer_number}"
            call = self._calls[kind] = Call(EXPERTS, rows, *sizes, dtype, backward, name)
        return call

    def drop(self) -> None:
        self.autotuner.drop()
        self._calls.clear()

    def compute(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts and combine of one call: tokens in the order of `dispatch_preprocess`, to their results."""
        dispatcher, known = layer.token_dispatcher, self._layers[layer]
        assert known.experts is not None
        experts = known.experts.begin(hidden_states)
        dispatcher.tokens_per_expert = None
        rank, size = dispatcher.ep_group.rank(), dispatcher.ep_size
        counts = self._counts.pop(dispatcher).view(size, size, dispatcher.num_local_experts).cpu()
        options, shared = self.options, self._shared.get(layer)
        if shared is not None:
            ratio = layer.config.moe_shared_expert_intermediate_size / layer.config.moe_ffn_hidden_size
            options = options._replace(filler_rows=shared.x.shape[:-1].numel() * ratio)
        results = expert_parallel(
            hidden_states,
            probs,
            counts[rank].tolist(),
            counts[:, rank].tolist(),
            experts,
            totals=counts.sum(2).tolist(),
            group=open_device_transport(self.session, dispatcher.ep_group),
            options=options,
            observer=partial(self.session.counters.overlapped, "expert", known.name, _OP),
            filler=None if shared is None else partial(self.compute_shared, layer),
        )
        known.experts.end()
        return results


def _replacement(name: str) -> Method:
    """The factory that replaces Megatron's method `name` by that of `ExpertAdapter`."""

    def factory(original: Method, session: Session) -> Method:
        adapter = session.adapter(ExpertAdapter)
        adapter.stock[name] = original

        @untraced
        def run(*args: Any, **kwargs: Any) -> Any:
            return getattr(adapter, name)(*args, **kwargs)

        return run

    return factory


preprocess = _replacement("preprocess")
shared_experts_compute = _replacement("shared_experts_compute")
dispatch = _replacement("dispatch")
routed_experts_compute = _replacement("routed_experts_compute")
combine = _replacement("combine")
postprocess = _replacement("postprocess")
