"""Replacement of the forward methods of Megatron's `inference_optimized` linear layers.

Their own kernels run communication and GEMM one after the other. Training, one tensor-parallel rank, CUDA graphs and
calls below the threshold of forward-only calls run the original. Not yet run on a GPU.
"""

import functools
from typing import Any

import torch
from megatron.core.tensor_parallel.inference_layers import _te_rms_norm_kernel

from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import is_capturing, te_communicates, unsupported_te_reason
from megatron_overlap.adapters.tensor_parallel.forward_only import is_forward_only
from megatron_overlap.adapters.wrapping import Method, replaces
from megatron_overlap.session import Session

_FUSED = "Megatron fuses reduce-scatter, norm and all-gather of this layer"
_MXFP8 = "the weight is MXFP8"


def inference_linear_forward(original: Method, session: Session) -> Method:
    """Replacement of `forward` of the three parallel linear layers of `inference_optimized`.

    Equals the original, without bias: `all_gather(x) @ weight.T`, after an RMSNorm in
    `InferenceLayerNormColumnParallelLinear`, or `reduce_scatter(x @ weight.T)`.
    """
    adapter = session.adapter(LinearAdapter)
    tuned, runs_stock = adapter.autotuner.enabled, adapter.autotuner.runs_stock

    @replaces(original)
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        weight, kind = self.weight, self.parallel_mode
        if self.training or is_capturing(x) or not te_communicates(self):
            return original(self, x, *args, **kwargs)
        if not isinstance(weight, torch.Tensor):
            session.counters.exclude(type(self).__name__, _MXFP8)
            return original(self, x, *args, **kwargs)
        if args or kwargs or not is_forward_only(x, weight):
            return original(self, x, *args, **kwargs)
        if tuned and not adapter.assigned and runs_stock(self, x, weight):
            return original(self, x)
        op = "gemm_rs" if kind == "row" else "ag_gemm"
        scale = self._parameters.get("layer_norm_weight")
        norm = None if scale is None else functools.partial(_te_rms_norm_kernel, weight=scale, eps=self.eps)
        hooks, run_stock = adapter.hooks(kind, op, x, weight), functools.partial(original, self, x)
        call = LinearCall(
            self, op, x, weight, None, self.tp_group, None, None, hooks, run_stock, lambda output: (output, None), norm
        )
        return adapter.run(call, _unsupported_reason(self, x))

    return forward


def _unsupported_reason(layer: Any, x: torch.Tensor) -> str | None:
    if getattr(layer, "skip_norm_and_all_gather", False) or getattr(layer, "next_layer_norm_weights", None) is not None:
        return _FUSED
    return unsupported_te_reason(layer, x)
