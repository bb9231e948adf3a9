"""What replacements of Megatron's methods have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

type Method = Callable[..., Any]


# Of all ways to ask it touches least.
tracing = torch.compiler.is_dynamo_compiling
"""Whether `torch.compile` is reading what asks."""


def untraced(method: Method) -> Method:
    """`method`, which `torch.compile` does not enter: it runs as it is, between the graphs of what is around it."""
    eager: Method = torch.compiler.disable(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # A call of what `disable` returns costs microseconds more, so it is made only where somebody traces.
        return (eager if tracing() else method)(*args, **kwargs)

    return run


@contextmanager
def own_forward(module: Any, forward: Method) -> Iterator[None]:
    """Gives one module a `forward` of its own for a while; hooks on the module go on running."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
