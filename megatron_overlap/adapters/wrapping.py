"""Helpers of the replacements of Megatron's methods."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

type Method = Callable[..., Any]


# The cheapest of the equivalent functions of torch.
tracing = torch.compiler.is_dynamo_compiling
"""Whether `torch.compile` is tracing the caller."""


def untraced(method: Method) -> Method:
    """`method`, which `torch.compile` does not trace: it runs eagerly between the graphs before and after it."""
    eager: Method = torch.compiler.disable(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A call of a disabled function costs microseconds more, so it is made only under torch.compile.
        return (eager if tracing() else method)(*args, **kwargs)

    return run


@contextmanager
def own_forward(module: Any, forward: Method) -> Iterator[None]:
    """Replaces the `forward` of one module inside the context; hooks of the module still run."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
