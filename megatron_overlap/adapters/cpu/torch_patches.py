"""What is replaced in torch, and why.

Every entry answers a call that Megatron makes; nothing is replaced for the sake of completeness. Functions that
run once per operation (``empty``, ``Tensor.to``) get one type test more, nothing else.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # indexes torch's functions when first imported (the optimizers do): it must see the originals

from megatron_overlap.adapters.cpu import cuda_stubs
from megatron_overlap.adapters.cpu.cuda_stubs import CPU, asked_by_megatron
from megatron_overlap.adapters.cpu.patcher import Adaptation

_FACTORIES = (
    "arange", "as_tensor", "empty", "empty_like", "empty_strided", "eye", "full", "full_like", "linspace",
    "ones", "ones_like", "rand", "rand_like", "randint", "randn", "randn_like", "randperm", "tensor", "zeros",
    "zeros_like",
)  # fmt: skip
_TYPE_NAMES = (
    "BFloat16Tensor", "BoolTensor", "ByteTensor", "CharTensor", "DoubleTensor", "FloatTensor", "HalfTensor",
    "IntTensor", "LongTensor", "ShortTensor",
)  # fmt: skip


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _means_cuda(device: Any) -> bool:
    if type(device) is torch.device:
        return device.type == "cuda"
    return isinstance(device, str) and device.startswith("cuda")


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> Any:
        if kwargs:
            if _means_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            # Page-locked memory is the driver's; asking for it here raises.
            kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return create


def _tensor_to(original: Callable[..., Any]) -> Callable[..., Any]:
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and _means_cuda(args[0]):
            args = (CPU, *args[1:])
        elif kwargs and _means_cuda(kwargs.get("device")):
            kwargs["device"] = CPU
        return original(self, *args, **kwargs)

    return to


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            name = original(self)
            return name.replace("torch.", "torch.cuda.", 1) if asked_by_megatron() else name
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.", 1)
        return original(self, dtype, *args, **kwargs)

    return type_


def _itself(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args, **kwargs: self


def _yes_to_megatron(original: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: asked_by_megatron() or original()


def _one_to_megatron(original: Callable[[], int]) -> Callable[[], int]:
    return lambda: 1 if asked_by_megatron() else original()


def _call_now(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda callback, **kwargs: callback()


def _gloo_only(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device_id", None)
        kwargs.pop("pg_options", None)
        return original("fake" if backend == "fake" else "gloo", *args, **kwargs)

    return init_process_group


def _gloo_group(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(
        ranks: Any = None,
        timeout: Any = None,
        backend: Any = None,
        pg_options: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        kwargs.pop("device_id", None)
        backend = "gloo" if backend in ("nccl", "mpi", "ucc") else backend
        return original(ranks, timeout, backend, None, *args, **kwargs)

    return new_group


def _draws_nothing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        state = torch.get_rng_state()
        try:
            return original(self)
        finally:
            torch.set_rng_state(state)

    return iterate


def _not_compiled(original: Callable[..., Any]) -> Callable[..., Any]:
    def compile_(model: Any = None, **kwargs: Any) -> Any:
        return (lambda function: function) if model is None else model

    return compile_


def _splits_as_lists(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_to_all_single(
        output: Any, input: Any, output_split_sizes: Any = None, input_split_sizes: Any = None, **kwargs: Any
    ) -> Any:
        splits = (
            sizes.tolist() if isinstance(sizes, torch.Tensor) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        )
        return original(output, input, *splits, **kwargs)

    return all_to_all_single


TORCH: tuple[Adaptation, ...] = (
    Adaptation("torch.cuda:is_available", _yes_to_megatron, "Megatron asserts it; torch must hear the truth"),
    Adaptation("torch.cuda:device_count", _one_to_megatron, "Megatron builds its groups only where it is above 0"),
    Adaptation("torch.cuda:current_device", _constant(lambda: CPU), "used as `device=` nearly everywhere"),
    Adaptation("torch.cuda:set_device", _constant(cuda_stubs.nothing), "there is one device"),
    Adaptation("torch.cuda:device", _constant(cuda_stubs.null_context), "there is one device"),
    Adaptation("torch.cuda:get_device_properties", _constant(cuda_stubs.device_properties), "argument validation"),
    Adaptation("torch.cuda:get_device_capability", _constant(lambda *_: (10, 0)), "argument validation"),
    Adaptation("torch.cuda:get_device_name", _constant(lambda *_: "cpu"), "log lines"),
    Adaptation("torch.cuda:synchronize", _constant(cuda_stubs.nothing), "timers; CPU operations are synchronous"),
    Adaptation("torch.cuda:Stream", _constant(cuda_stubs.Stream), "DDP and pipeline make streams"),
    Adaptation("torch.cuda:Event", _constant(cuda_stubs.Event), "timing and ordering between streams"),
    Adaptation("torch.cuda:stream", _constant(cuda_stubs.null_context), "Megatron keeps and re-enters the context"),
    Adaptation("torch.cuda:set_stream", _constant(cuda_stubs.nothing), "one stream"),
    Adaptation("torch.cuda:current_stream", _constant(lambda *_: cuda_stubs.THE_STREAM), "one stream"),
    Adaptation("torch.cuda:default_stream", _constant(lambda *_: cuda_stubs.THE_STREAM), "one stream"),
    Adaptation("torch.cuda:is_current_stream_capturing", _constant(lambda: False), "no graphs"),
    Adaptation("torch.cuda:empty_cache", _constant(cuda_stubs.nothing), "no caching allocator"),
    Adaptation("torch.cuda:memory_allocated", _constant(cuda_stubs.resident_bytes), "memory report"),
    Adaptation("torch.cuda:memory_reserved", _constant(cuda_stubs.resident_bytes), "memory report"),
    Adaptation("torch.cuda:max_memory_allocated", _constant(cuda_stubs.peak_resident_bytes), "memory report"),
    Adaptation("torch.cuda:max_memory_reserved", _constant(cuda_stubs.peak_resident_bytes), "memory report"),
    Adaptation("torch.cuda:reset_peak_memory_stats", _constant(cuda_stubs.nothing), "memory report"),
    Adaptation("torch.cuda:memory_stats", _constant(cuda_stubs.memory_stats), "memory report"),
    Adaptation("torch.cuda:manual_seed", _constant(cuda_stubs.manual_seed), "one generator"),
    Adaptation("torch.cuda:manual_seed_all", _constant(cuda_stubs.manual_seed), "torch.manual_seed calls it"),
    Adaptation("torch.cuda:get_rng_state", _constant(cuda_stubs.get_rng_state), "RNG tracker, checkpoints"),
    Adaptation("torch.cuda:set_rng_state", _constant(cuda_stubs.set_rng_state), "RNG tracker, checkpoints"),
    Adaptation("torch.cuda.random:get_rng_state", _constant(cuda_stubs.get_rng_state), "the tracker's own spelling"),
    Adaptation("torch.cuda:default_generators", _constant(cuda_stubs.Generators()), "the tracker sets the state here"),
    Adaptation("torch.cuda:_lazy_call", _call_now, "the tracker's set_state is queued until CUDA starts: never"),
    *(
        Adaptation(
            f"torch.cuda:{name}",
            _constant(getattr(torch, name)),
            "Float16Module tests tensors with isinstance against it",
        )
        for name in _TYPE_NAMES
    ),
    *(Adaptation(f"torch:{name}", _on_cpu, '`device="cuda"` and `pin_memory`') for name in _FACTORIES),
    Adaptation("torch:Tensor.to", _tensor_to, '`.to("cuda")`'),
    Adaptation("torch:Tensor.cuda", _itself, "batches and scalars are moved with it"),
    Adaptation("torch:Tensor.pin_memory", _itself, "checkpoint staging"),
    Adaptation("torch:Tensor.record_stream", _constant(cuda_stubs.nothing), "allocator hint, raises on CPU tensors"),
    Adaptation("torch:Tensor.type", _tensor_type, "optimizers and clip_grad compare it with 'torch.cuda.FloatTensor'"),
    Adaptation("torch.nn:Module.cuda", _itself, "get_model moves each chunk with it"),
    Adaptation("torch.distributed:init_process_group", _gloo_only, "gloo; no device_id, no NCCL options"),
    Adaptation("torch.distributed:new_group", _gloo_group, "gloo; no NCCL options"),
    Adaptation(
        "torch.distributed:all_to_all_single",
        _splits_as_lists,
        "the token dispatcher of experts makes lists of its split sizes only where they are on a GPU",
    ),
    Adaptation(
        "torch.utils.data:DataLoader.__iter__",
        _draws_nothing,
        "draws a seed from the generator, on tensor rank 0 only: dropout would differ inside a tensor group",
    ),
    Adaptation(
        "torch:compile",
        _not_compiled,
        "Megatron's jit_fuser; a compiler costs minutes here and gains nothing",
    ),
)
