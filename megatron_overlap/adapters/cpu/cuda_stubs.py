"""CPU substitutes for objects of torch.cuda: streams, events, generators, device properties, memory statistics."""

import contextlib
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import torch

CPU = torch.device("cpu")


def called_by_te() -> bool:
    """Whether the caller's caller is TransformerEngine code."""
    return str(sys._getframe(2).f_globals.get("__name__", "")).startswith("transformer_engine.")


CALLERS = {"megatron", "__main__"}
"""Packages, and the training script, that see a GPU."""


def called_by_megatron() -> bool:
    """Whether the caller's caller is Megatron code or the training script.

    Callers in torch must see no GPU: its optimizers and its DataLoader would otherwise look for a CUDA driver.
    """
    name = str(sys._getframe(2).f_globals.get("__name__", ""))
    return name.partition(".")[0] in CALLERS


def _calls[T](function: Callable[[], T]) -> Callable[..., T]:
    """A function that returns `function()`, whatever its arguments."""
    return lambda *_, **__: function()


def _returns[T](value: T) -> Callable[..., T]:
    return _calls(lambda: value)


do_nothing = _returns(None)


class Stream:
    """A stream without effect: a CPU runs operations in the order of the calls."""

    cuda_stream = 0
    device = CPU
    wait_stream = wait_event = synchronize = __exit__ = do_nothing
    query = _returns(True)
    priority_range = _returns((0, 0))

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event if event is not None else Event()
        event.record(self)
        return event

    def __enter__(self) -> "Stream":
        return self


class Event:
    """An event that completes when it is recorded; it stores the host's time."""

    wait = synchronize = do_nothing
    query = _returns(True)

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``, as in torch.cuda."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise ValueError("both events must be recorded before elapsed_time")
        return (end_event._recorded_s - self._recorded_s) * 1000.0


DEFAULT_GENERATORS = defaultdict[Any, torch.Generator](lambda: torch.default_generator)
"""The CPU generator under every index."""


def current_device() -> torch.device | int:
    """The CPU device; index 0 for TransformerEngine, which compares the result with integers."""
    return 0 if called_by_te() else CPU


current_stream = _returns(Stream())
never_capturing = _returns(False)
null_context = _returns(contextlib.nullcontext())
"""A context manager without effect that can be entered again."""
device_capability = _returns((10, 0))
"""The newest architecture that Megatron knows. From this one on it does not require CUDA_DEVICE_MAX_CONNECTIONS=1,
which orders kernels on a GPU."""
device_name = _returns("cpu")
resident_bytes = _calls(lambda: int(psutil.Process().memory_info().rss))
"""Resident set size of this process, in bytes."""
peak_resident_bytes = _calls(lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""Largest resident set size of this process so far, in bytes."""
memory_stats = _calls(lambda: defaultdict[str, int](int))
get_rng_state = _calls(lambda: torch.default_generator.get_state())


def device_properties(*_: Any, **__: Any) -> SimpleNamespace:
    return SimpleNamespace(
        name=device_name(),
        major=device_capability()[0],
        minor=device_capability()[1],
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=torch.get_num_threads(),
    )


def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))
