"""Replacements of methods of `MoELayer`: one overlapped operation in place of dispatch, experts and combine.

Router, permutation, capacity and auxiliary losses stay Megatron's. So do shared experts, which are computed while the
first tokens are dispatched. Not yet run on several GPUs.

`overlap.expert.method: auto` measures in the training whether a layer runs the stock path or p2p. The routing of a
layer changes in every call, so a kind of call is a layer, whatever its rows. The autotuner compares trimmed means over
many calls of the layer, and replaces the stock path only beyond its margin (hysteresis).
"""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.expert_parallel.experts import LayerExperts, unsupported_layer_reason
from megatron_overlap.adapters.tensor_parallel.autotune import GroupAutotuners
from megatron_overlap.adapters.wrapping import Method, replaces
from megatron_overlap.autotune.candidates import EXPERTS, STOCK, Call, Candidate
from megatron_overlap.autotune.tuner import Autotuner
from megatron_overlap.ops import ExpertOptions, expert_parallel
from megatron_overlap.ops.call import Observer
from megatron_overlap.session import Adapter, Session

_OP = "expert_parallel"
_ONE_RANK = "one expert-parallel rank: the layer does not communicate"


@dataclass(frozen=True, slots=True)
class _Layer:
    """What cannot change between the calls of one `MoELayer`, `name` in the report.

    `experts` is None if it does not run overlapped. `reason` is None too if it does not communicate.
    """

    name: str
    experts: LayerExperts | None
    reason: str | None
    observer: Observer


@dataclass(slots=True)
class _SharedExperts:
    """Input and, once it is computed, output of the shared experts in one call."""

    x: torch.Tensor
    y: torch.Tensor | None = None


class ExpertAdapter(Adapter):
    """Options and counters of the mixture-of-experts layers of one session.

    Attributes:
        overlapped: layers between their `dispatch` and `combine` that `routed_experts_compute` computes alone.
        stock: the replaced methods by name.
        autotuner: selects the stock path or p2p with `method: auto`.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.options = ExpertOptions(
            fixed_order=bool(session.config.deterministic), schedule=session.config.expert.schedule
        )
        self.overlapped: weakref.WeakSet[Any] = weakref.WeakSet()
        self.stock: dict[str, Method] = {}
        self.autotuner = GroupAutotuners(session, session.config.expert.method)
        self._calls: dict[tuple[object, ...], Call] = {}
        self._layers: weakref.WeakKeyDictionary[Any, _Layer] = weakref.WeakKeyDictionary()
        self._shared: weakref.WeakKeyDictionary[Any, _SharedExperts] = weakref.WeakKeyDictionary()

    def postpones_shared(self, layer: Any, hidden_states: torch.Tensor) -> bool:
        """Called in `shared_experts_compute`: whether this call computes them after its `dispatch` has begun."""
        self._shared.pop(layer, None)
        if not layer.use_shared_expert or self._layer(layer).experts is None:
            return False
        if layer.shared_experts.use_shared_expert_gate:
            # Their input has two gradients. Stock adds each to that of `hidden_states`, the view below adds their sum.
            return False
        # Autograd runs the backward of this view last, so the gradients of `hidden_states` are added in stock order.
        self._shared[layer] = _SharedExperts(hidden_states.view_as(hidden_states))
        return True

    def compute_shared(self, layer: Any) -> None:
        """Computes the postponed shared experts of this call, if it has any."""
        shared = self._shared.get(layer)
        if shared is not None:
            shared.y = self.stock["shared_experts_compute"](layer, shared.x)

    def take_shared(self, layer: Any) -> torch.Tensor | None:
        """The output of the postponed shared experts of this call."""
        shared = self._shared.pop(layer, None)
        return None if shared is None else shared.y

    def begins(self, layer: Any, hidden_states: torch.Tensor) -> bool:
        """Called in `dispatch`: whether `routed_experts_compute` computes this call alone. A fallback is counted."""
        self.overlapped.discard(layer)
        known = self._layer(layer)
        reason = known.reason
        if known.experts is not None:
            reason = known.experts.unsupported_reason(hidden_states, layer.token_dispatcher.ep_group)
            if reason is None:
                self.overlapped.add(layer)
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
                self.session.counters.exclude("MoELayer", _ONE_RANK)
            else:
                reason = unsupported_layer_reason(layer)
                experts = LayerExperts(layer.experts) if reason is None else None
            observer = partial(self.session.counters.overlapped, "expert", name, _OP)
            known = self._layers[layer] = _Layer(name, experts, reason, observer)
        return known

    def run(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts and combine of one call by the selected method."""
        if not self.autotuner.enabled:
            return self.compute(layer, hidden_states, probs)

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
        result: torch.Tensor = autotuner.run(call, run, (hidden_states, probs), lambda: candidates)[0]
        return result

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
            call = self._calls[kind] = Call(
                EXPERTS,
                rows,
                layer.config.hidden_size,
                layer.config.moe_ffn_hidden_size,
                str(hidden_states.dtype).removeprefix("torch."),
                backward,
                f"{layer.num_local_experts} experts of {'prediction ' * predicts}layer {layer.layer_number}",
            )
        return call

    def drop(self) -> None:
        """See `Adapter`."""
        self.autotuner.drop()
        self._calls.clear()

    def compute(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts and combine of one call: tokens in the order of `dispatch_preprocess`, to their results."""
        dispatcher, known = layer.token_dispatcher, self._layers[layer]
        assert known.experts is not None
        experts = known.experts.begin(hidden_states)
        # The points at which the stock dispatcher moves its counts to the host.
        for point in ("before_ep_alltoall", "before_permutation_2", "before_finish"):
            dispatcher.tokens_per_expert = dispatcher._maybe_dtoh_and_synchronize(point, dispatcher.tokens_per_expert)
        dispatcher.tokens_per_expert = None
        shape = dispatcher.ep_size, dispatcher.num_local_experts
        sent = dispatcher.routing_map.sum(0).view(shape).tolist()
        received = (
            dispatcher.num_global_tokens_per_local_expert.view(shape).tolist()
            if dispatcher.num_local_experts > 1
            else [[int(count)] for count in dispatcher.output_splits]
        )
        options, shared = self.options, self._shared.get(layer)
        if shared is not None:
            ratio = layer.config.moe_shared_expert_intermediate_size / layer.config.moe_ffn_hidden_size
            options = options._replace(filler_rows=shared.x.shape[:-1].numel() * ratio)
        results = expert_parallel(
            hidden_states,
            probs,
            sent,
            received,
            experts,
            group=open_transport(self.session, dispatcher.ep_group),
            options=options,
            observer=known.observer,
            filler=None if shared is None else partial(self.compute_shared, layer),
        )
        known.experts.end()
        return results


def shared_experts_compute(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.shared_experts_compute`: returns None where they are computed during dispatch."""
    adapter = session.adapter(ExpertAdapter)
    adapter.stock["shared_experts_compute"] = original

    @replaces(original)
    def shared_experts_compute(self: Any, hidden_states: torch.Tensor) -> Any:
        if adapter.postpones_shared(self, hidden_states):
            return None
        return original(self, hidden_states)

    return shared_experts_compute


def dispatch(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.dispatch`: the identity where `routed_experts_compute` computes the layer."""
    adapter = session.adapter(ExpertAdapter)
    adapter.stock["dispatch"] = original

    @replaces(original)
    def dispatch(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if adapter.begins(self, hidden_states):
            return hidden_states, probs
        adapter.compute_shared(self)
        return original(self, hidden_states, probs)

    return dispatch


def routed_experts_compute(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.routed_experts_compute`: dispatches, computes and combines.

    Equals `combine(routed_experts_compute(*dispatch(hidden_states, probs)))` of the original methods.
    """
    adapter = session.adapter(ExpertAdapter)
    adapter.stock["routed_experts_compute"] = original

    @replaces(original)
    def routed_experts_compute(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if self in adapter.overlapped:
            return adapter.run(self, hidden_states, probs), None
        return original(self, hidden_states, probs)

    return routed_experts_compute


def combine(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.combine`: the identity where `routed_experts_compute` computed the layer."""
    adapter = session.adapter(ExpertAdapter)
    adapter.stock["combine"] = original

    @replaces(original)
    def combine(self: Any, output: torch.Tensor) -> Any:
        if self in adapter.overlapped:
            adapter.overlapped.discard(self)
            return output
        return original(self, output)

    return combine


def postprocess(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.postprocess`: adds the shared experts that were computed during dispatch."""
    adapter = session.adapter(ExpertAdapter)

    @replaces(original)
    def postprocess(self: Any, output: torch.Tensor, shared_expert_output: torch.Tensor | None) -> Any:
        if shared_expert_output is None:
            shared_expert_output = adapter.take_shared(self)
        return original(self, output, shared_expert_output)

    return postprocess
