"""What is replaced in Megatron itself, and why."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from megatron_overlap.adapters.cpu import cuda_stubs
from megatron_overlap.adapters.cpu.patcher import Adaptation

RNG_LOGGER = "megatron.core.tensor_parallel.random"


def _norm_for_sequence_parallel(original: Callable[..., Any]) -> staticmethod[..., Any]:
    @functools.wraps(original)
    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        # The mark by which Megatron sums these gradients over the tensor group: each rank saw its rows only.
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return staticmethod(new)


def _state_before_first_step(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is not None and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
        return original(self, *args, **kwargs)

    return state_dict


def _step_of_the_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        groups = state_dict.get("optimizer", {}).get("param_groups", ())
        steps = {float(group["step"]) for group in groups if group.get("step") is not None}
        with torch.no_grad():
            result = original(self, state_dict, *args, **kwargs)
        if self.optimizer is not None and len(steps) == 1:
            step = torch.tensor(steps.pop(), dtype=torch.float32)
            for state in self.optimizer.state.values():
                state["step"] = step.clone()
        return result

    return load_state_dict


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return cuda_stubs.nothing


MEGATRON: tuple[Adaptation, ...] = (
    Adaptation(
        "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__",
        _norm_for_sequence_parallel,
        "refuses sequence parallelism, and the norms that accept it need apex or TransformerEngine",
    ),
    Adaptation(
        "megatron.training.initialize:_warmup_jit_function",
        _skip,
        "warms kernels that are not compiled here, with random inputs whose number depends on the layout: "
        "with one generator for everything the initial weights would depend on it too",
        optional=True,
    ),
    Adaptation(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.state_dict",
        _state_before_first_step,
        "loading a checkpoint asks torch's Adam (used without apex and TransformerEngine) for the step number of a "
        "state that it makes only at its first step",
    ),
    Adaptation(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict",
        _step_of_the_checkpoint,
        "leaves torch's Adam with the step number it had before loading, in one tensor that all parameters share "
        "and each would advance; and copies into fp32 parameters with autograd on, which raises",
    ),
)


class QuietRngWarning(logging.Filter):
    """Drops one warning of the RNG tracker.

    The tracker warns when the CPU generator moves while it has lent out a CUDA generator. Here they are the same
    generator, so that it always moves.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
