"""Replacements of three methods of `MoELayer`: one overlapped operation in place of dispatch, experts and combine.

Router, permutation, capacity, auxiliary losses and shared experts stay Megatron's. Not yet run on a GPU.
"""

import functools
import weakref
from typing import Any

import torch

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.expert_parallel.experts import experts_of, linears_of, unsupported_reason
from megatron_overlap.adapters.wrapping import Method, run_pre_hooks, untraced
from megatron_overlap.ops import ExpertOptions, expert_parallel
from megatron_overlap.session import Adapter, Session

_OP = "expert_parallel"
_ONE_RANK = "one expert-parallel rank: the layer does not communicate"


class ExpertAdapter(Adapter):
    """Options and counters of the mixture-of-experts layers of one session.

    Attributes:
        options: of the operation.
        overlapped: layers between their `dispatch` and `combine` that the operation computes.
    """

    def __init__(self, session: Session) -> None:
        self.session = session
        self.options = ExpertOptions(fixed_order=session.config.deterministic)
        self.overlapped: weakref.WeakSet[Any] = weakref.WeakSet()

    def begins(self, layer: Any, hidden_states: torch.Tensor) -> bool:
        """Called in `dispatch`: whether the operation computes this call. A fallback is counted."""
        self.overlapped.discard(layer)
        counters = self.session.counters
        if layer.token_dispatcher.ep_size == 1:
            counters.exclude("MoELayer", _ONE_RANK)
            return False
        reason = unsupported_reason(layer, hidden_states)
        if reason is not None:
            counters.fallback("expert", _name(layer), _OP, "forward", reason)
            return False
        self.overlapped.add(layer)
        return True

    def compute(self, layer: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Dispatch, experts and combine of one call: tokens in the order of `dispatch_preprocess`, to their results."""
        dispatcher, counters, name = layer.token_dispatcher, self.session.counters, _name(layer)
        for module in layer.experts.modules():
            run_pre_hooks(module, hidden_states, "set overlap.expert.method to none")
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

        results = expert_parallel(
            hidden_states,
            probs,
            sent,
            received,
            experts_of(layer.experts),
            group=open_transport(self.session, dispatcher.ep_group),
            options=self.options,
            observer=functools.partial(counters.overlapped, "expert", name, _OP),
        )
        for linear in linears_of(layer.experts):
            if hasattr(linear, "is_first_microbatch"):
                linear.is_first_microbatch = False  # As Megatron's wrapper does after every forward.
        return results


def dispatch(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.dispatch`: the identity where the operation computes the layer."""
    adapter = session.adapter(ExpertAdapter)

    @untraced
    @functools.wraps(original)
    def dispatch(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if adapter.begins(self, hidden_states):
            return hidden_states, probs
        return original(self, hidden_states, probs)

    return dispatch


def routed_experts_compute(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.routed_experts_compute`: dispatches, computes and combines.

    Equals `combine(routed_experts_compute(*dispatch(hidden_states, probs)))` of the original methods.
    """
    adapter = session.adapter(ExpertAdapter)

    @untraced
    @functools.wraps(original)
    def routed_experts_compute(self: Any, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
        if self in adapter.overlapped:
            return adapter.compute(self, hidden_states, probs), None
        return original(self, hidden_states, probs)

    return routed_experts_compute


def combine(original: Method, session: Session) -> Method:
    """Replacement of `MoELayer.combine`: the identity where the operation computed the layer."""
    adapter = session.adapter(ExpertAdapter)

    @untraced
    @functools.wraps(original)
    def combine(self: Any, output: torch.Tensor) -> Any:
        if self in adapter.overlapped:
            adapter.overlapped.discard(self)
            return output
        return original(self, output)

    return combine


def _name(layer: Any) -> str:
    config = layer.config
    return f"{layer.num_local_experts}x{config.hidden_size}->{config.moe_ffn_hidden_size}"
