"""Query split: the core attention and the output projection of a Megatron attention layer run as one operation.

`Attention.forward` calls the two modules one after the other in every supported release. For the time of one call their
`forward` is replaced: the one of the core attention stores query, key and value and returns a placeholder, the one of
the projection runs the joint operation. Hooks on both modules still run. An unsupported call runs both originals.
"""

from typing import Any

import torch

from megatron_overlap.adapters.tensor_parallel import eligibility
from megatron_overlap.adapters.tensor_parallel.call import projection_of
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.linear import add_row_bias
from megatron_overlap.adapters.wrapping import Method, replaced, untraced
from megatron_overlap.ops import attention_linear_reduce_scatter
from megatron_overlap.session import Session

_KIND, _OP = "attention", "query_split"
_GENERATION = "generation: its attention reads a KV cache; the output projection is overlapped alone"


def attention_forward(original: Method, session: Session) -> Method:
    """Replacement of `Attention.forward`: `linear_proj(core_attention(query, key, value))` as in the original."""
    adapter = session.adapter(LinearAdapter)

    @untraced
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = self.pg_collection.tp
        if group is None or group.size() == 1:
            return original(self, *args, **kwargs)
        if kwargs.get("inference_context") is not None:  # Megatron's transformer layer gives it by name
            session.counters.exclude("query split", _GENERATION)
            return original(self, *args, **kwargs)
        reason = eligibility.unsupported_attention_reason(self)
        if reason is not None:
            x = args[0] if args else kwargs["hidden_states"]
            adapter.hooks(_KIND, _OP, x, self.linear_proj.weight).fallback(reason)
            return original(self, *args, **kwargs)
        joint = _JointCall(self.core_attention, self.linear_proj, adapter)
        core, projection = vars(self.core_attention), vars(self.linear_proj)
        with replaced(core, forward=joint.core_attention), replaced(projection, forward=joint.projection):
            return original(self, *args, **kwargs)

    return forward


class _JointCall:
    """One call of an attention layer."""

    def __init__(self, core: Any, projection: Any, adapter: LinearAdapter) -> None:
        self._core, self._projection, self._adapter = core, projection, adapter
        self._core_forward, self._projection_forward = core.forward, projection.forward
        self._operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self._placeholder: torch.Tensor | None = None

    def core_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
    ) -> torch.Tensor:
        """The forward of the core attention: stores its operands."""
        layer, adapter = self._projection, self._adapter
        reason = (
            (eligibility.CAPTURED if eligibility.is_capturing(query) else None)
            or eligibility.unsupported_core_attention_reason(self._core, query, key, value, attention_mask, kwargs)
            or (
                eligibility.unsupported_te_reason(layer, query)
                if eligibility.is_te_linear(layer)
                else eligibility.unsupported_row_reason(layer, query)
            )
            or adapter.unsupported_reason(query, layer.weight, layer.tp_group, _OP)
        )
        if reason is not None:
            adapter.hooks(_KIND, _OP, query, layer.weight).fallback(reason)
            return self._core_forward(query, key, value, attention_mask, **kwargs)
        self._operands = query, key, value
        # The shape of the result, without memory. A module that computes with it gets NaN.
        width = query.shape[2] * query.shape[3]
        self._placeholder = query.new_full((), float("nan")).expand(query.shape[0], query.shape[1], width)
        return self._placeholder

    def projection(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The forward of the output projection: runs both."""
        if self._operands is None:
            return self._projection_forward(input_)
        if input_ is not self._placeholder:
            text = "an unknown operation runs between core attention and output projection"
            raise RuntimeError(f"{text}: set overlap.tensor.attention to row")
        layer, core, adapter = self._projection, self._core, self._adapter
        projection = projection_of(layer, layer.weight)
        if eligibility.is_te_linear(layer):
            layer.is_first_microbatch = False  # As Megatron's wrapper does after every forward.
        softmax = getattr(core, "scale_mask_softmax", None)  # TransformerEngine's attention has none.
        output = attention_linear_reduce_scatter(
            *self._operands,
            projection.weight,
            group=adapter.transport(layer.tp_group),
            # Under query-key layer scaling Megatron divides the first factor by the second.
            softmax_scale=core.softmax_scale * ((softmax and softmax.scale) or 1),
            plan=adapter.plan,
            main_grad=projection.main_grad,
            weight_done=projection.done,
            observer=adapter.hooks(_KIND, _OP, self._operands[0], layer.weight).overlapped,
        )
        return add_row_bias(layer, output)
