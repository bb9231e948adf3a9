"""Helpers of the methods that replace Megatron's."""

import functools
import types
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

type Method = Callable[..., Any]

_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks

_WITHOUT_CHANGES = "megatron.", "megatron_overlap.", "transformer_engine."
"""Modules whose forward pre-hooks leave the input as it is."""

tracing = torch.compiler.is_dynamo_compiling
"""Whether `torch.compile` traces the caller. The cheapest of torch's equivalent queries."""


def untraced(method: Method) -> Method:
    """`method`, excluded from `torch.compile`: it runs eagerly between two graphs."""
    eager: Method = torch.compiler.disable(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The wrapper of `torch.compiler.disable` costs microseconds, so it runs under a trace only.
        return (eager if tracing() else method)(*args, **kwargs)

    return run


def with_globals(method: Any, names: dict[str, Any]) -> Method:
    """A copy of `method` in which the global `names` are replaced. The module of `method` is not changed."""
    scope = {**method.__globals__, **names}
    return types.FunctionType(method.__code__, scope, method.__name__, method.__defaults__, method.__closure__)


def recomputed_by_torch() -> str | None:
    """The reason if `torch.utils.checkpoint` runs the caller and compares what both passes save: no `use_reentrant`."""
    hooks = _saved_tensors_hooks(True)
    if hooks is None or hooks[0].__module__ != "torch.utils.checkpoint":
        return None
    return "torch.utils.checkpoint recomputes the layer: use Megatron's recomputation"


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether a hook reads the output of `module`, or the gradient of its input or output."""
    return bool(module._forward_hooks or module._backward_hooks or module._backward_pre_hooks)


def is_pre_hooked(module: torch.nn.Module) -> bool:
    """Whether a forward pre-hook may change the input of `module`. Those of Megatron wait for parameters."""
    hooks = module._forward_pre_hooks.values()
    return any(not str(getattr(hook, "__module__", "")).startswith(_WITHOUT_CHANGES) for hook in hooks)


def run_pre_hooks(module: torch.nn.Module, value: torch.Tensor, remedy: str) -> None:
    """Runs the pre-hooks of a module that is not called: in these Megatron waits for the gather of parameters.

    Raises RuntimeError if a hook changes the input; the message ends with `remedy`.
    """
    for hook in module._forward_pre_hooks.values():
        if hook(module, (value,)) is not None:
            name = type(module).__name__
            raise RuntimeError(f"a forward pre-hook changes the input of {name}, which is not called here: {remedy}")


@contextmanager
def replaced(names: MutableMapping[str, Any], **values: Any) -> Iterator[None]:
    """Replaces items of `names` inside the context, such as the attributes `vars(module)`, whose hooks still run."""
    before = {name: names[name] for name in values if name in names}
    names.update(values)
    try:
        yield
    finally:
        for name in values.keys() - before.keys():
            del names[name]
        names.update(before)
