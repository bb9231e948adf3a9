"""Factories of the patches in `patches/cpu/` that replace attributes of Megatron."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch

RNG_LOGGER = "megatron.core.tensor_parallel.random"


def norm_for_sequence_parallel(original: Callable[..., Any], session: object) -> Callable[..., Any]:
    """Makes the norm without sequence parallelism and marks its parameters."""

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        if not config.sequence_parallel:
            return original(cls, config, *args, **kwargs)
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = original(cls, plain, *args, **kwargs)
        # Megatron sums gradients with this mark over the tensor group: each rank normalizes its own rows.
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    return new


def state_before_first_step(original: Callable[..., Any], session: object) -> Callable[..., Any]:
    """Makes the state of torch's Adam that its first step would make; other optimizers are unchanged."""

    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.zeros((), dtype=torch.float32),
                        "exp_avg": torch.zeros_like(parameter.data),
                        "exp_avg_sq": torch.zeros_like(parameter.data),
                    }
        return original(self, *args, **kwargs)

    return state_dict


def step_of_the_checkpoint(original: Callable[..., Any], session: object) -> Callable[..., Any]:
    """Sets the step number of the checkpoint in torch's Adam, in one tensor per parameter."""

    def load_state_dict(self: Any, state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        groups = state_dict.get("optimizer", {}).get("param_groups", ())
        steps = {float(group["step"]) for group in groups if group.get("step") is not None}
        with torch.no_grad():
            result = original(self, state_dict, *args, **kwargs)
        if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) and len(steps) == 1:
            step = torch.tensor(steps.pop(), dtype=torch.float32)
            for state in self.optimizer.state.values():
                state["step"] = step.clone()
        return result

    return load_state_dict


def skip_warmup(original: Callable[..., Any], session: object) -> Callable[..., Any]:
    """Skips the warm-up of compiled kernels."""

    def skip(*args: Any, **kwargs: Any) -> None:
        return None

    return skip


class QuietRngWarning(logging.Filter):
    """Drops one warning of the RNG tracker.

    The tracker warns when the state of the CPU generator changes while a CUDA generator is in use. Here they are the
    same generator, so that its state always changes.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
