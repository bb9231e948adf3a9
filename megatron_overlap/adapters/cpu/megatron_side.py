"""What is replaced in Megatron itself, and why."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron_overlap.adapters.cpu import stand_ins
from megatron_overlap.adapters.cpu.adaptation import Adaptation

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


def _skip(original: Callable[..., Any]) -> Callable[..., Any]:
    return stand_ins.nothing


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
)


class QuietRngWarning(logging.Filter):
    """Drops one warning of the RNG tracker.

    The tracker warns when the CPU generator moves while it has lent out a CUDA generator. Here they are the same
    generator, so that it always moves.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
