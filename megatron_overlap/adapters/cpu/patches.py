"""Factories of the patches in `patches/cpu/`.

Functions that run once per operation (`empty`, `Tensor.to`) get one more type test and nothing else.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from megatron_overlap.adapters.cpu.cuda_stubs import CPU, called_by_megatron, called_by_te
from megatron_overlap.adapters.wrapping import Method


def _means_cuda(device: Any) -> bool:
    if type(device) is torch.device:
        return device.type == "cuda"
    # torch takes an integer as the index of a CUDA device.
    return type(device) is int or (isinstance(device, str) and device.startswith("cuda"))


def on_cpu(factory: Method, session: object) -> Method:
    """Makes tensors on the CPU where CUDA is asked for, without page-locked memory."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            # Page-locked memory needs a CUDA driver; without one the call raises.
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def tensor_to(original: Method, session: object) -> Method:
    """`Tensor.to`: returns a tensor on the CPU where the caller requests CUDA."""

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _means_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def tensor_type(original: Method, session: object) -> Method:
    """Reports torch.cuda types to Megatron and accepts them; other code gets the true type."""

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return name.replace("torch.", "torch.cuda.", 1) if called_by_megatron() else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def identity(original: Method, session: object) -> Method:
    """A method that returns its tensor or module."""
    return lambda self, *args, **kwargs: self


def true_for_megatron(original: Callable[[], bool], session: object) -> Callable[[], bool]:
    """True for Megatron and TransformerEngine; the original answer for other code."""
    return lambda: called_by_megatron() or called_by_te() or original()


def on_gpu_for_te(original: Any, session: object) -> property:
    """True for TransformerEngine, whose checks refuse CPU tensors; the original answer for other code."""
    return property(lambda self: called_by_te() or original.__get__(self))


def one_for_megatron(original: Callable[[], int], session: object) -> Callable[[], int]:
    """1 for Megatron; the original answer for other code."""
    return lambda: 1 if called_by_megatron() else original()


def _in_place_of(replacement: Method) -> Method:
    """The factory of a patch that calls `replacement(original, ...)`: one more call than a factory of its own."""

    def factory(original: Method, session: object) -> Method:
        @functools.wraps(original)
        def run(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs)

        return run

    return factory


@_in_place_of
def call_now(original: Method, callback: Callable[[], Any], **kwargs: Any) -> Any:
    """Calls back at once."""
    return callback()


@_in_place_of
def gloo_only(original: Method, backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
    """Makes the process group with gloo, unless it is a fake one."""
    kwargs.pop("device_id", None)
    kwargs.pop("pg_options", None)
    return original("fake" if backend == "fake" else "gloo", *args, **kwargs)


@_in_place_of
def gloo_group(
    original: Method,
    ranks: Any = None,
    timeout: Any = None,
    backend: Any = None,
    pg_options: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Makes the group with gloo where a GPU backend is asked for."""
    kwargs.pop("device_id", None)
    backend = "gloo" if backend in ("nccl", "mpi", "ucc") else backend
    return original(ranks, timeout, backend, None, *args, **kwargs)


@_in_place_of
def keeps_generator(original: Method, self: Any) -> Any:
    """Restores the random state after an iterator is made."""
    with torch.random.fork_rng(devices=()):
        return original(self)


@_in_place_of
def not_compiled(original: Method, model: Any = None, **kwargs: Any) -> Any:
    """Returns the function as it is."""
    return (lambda function: function) if model is None else model


@_in_place_of
def splits_as_lists(
    original: Method,
    output: Any,
    input: Any,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    **kwargs: Any,
) -> Any:
    """Accepts split sizes as tensors."""
    given = (output_split_sizes, input_split_sizes)
    splits = (sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes for sizes in given)
    return original(output, input, *splits, **kwargs)


@_in_place_of
def without_script(original: Method, name: str) -> dict[str, Any]:
    """Starts a process without running the training script there first."""
    data: dict[str, Any] = original(name)
    data.pop("init_main_from_path", None)
    return data


@_in_place_of
def norm_for_sequence_parallel(original: Method, cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
    """Makes the norm without sequence parallelism and marks its parameters."""
    if not config.sequence_parallel:
        return original(cls, config, *args, **kwargs)
    plain = copy.copy(config)
    plain.sequence_parallel = False
    norm = original(cls, plain, *args, **kwargs)
    # Megatron sums gradients with this mark over the tensor group: each rank normalizes its own rows.
    for parameter in norm.parameters():
        parameter.sequence_parallel = True
    return norm


@_in_place_of
def state_before_first_step(original: Method, self: Any) -> Any:
    """Makes the state of torch's Adam that its first step would make; other optimizers are unchanged."""
    if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) and not self.optimizer.state:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter.data),
                    "exp_avg_sq": torch.zeros_like(parameter.data),
                }
    return original(self)


@_in_place_of
def step_of_the_checkpoint(original: Method, self: Any, state_dict: Any) -> Any:
    """Sets the step number of the checkpoint in torch's Adam, in one tensor per parameter."""
    groups = state_dict.get("optimizer", {}).get("param_groups", ())
    steps = {float(group["step"]) for group in groups if group.get("step") is not None}
    with torch.no_grad():
        result = original(self, state_dict)
    if isinstance(self.optimizer, torch.optim.Adam | torch.optim.AdamW) and len(steps) == 1:
        step = torch.tensor(steps.pop(), dtype=torch.float32)
        for state in self.optimizer.state.values():
            state["step"] = step.clone()
    return result


@_in_place_of
def skip_warmup(original: Method, *args: Any, **kwargs: Any) -> None:
    """Skips the warm-up of compiled kernels."""
