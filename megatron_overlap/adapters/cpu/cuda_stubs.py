"""CPU objects with the faces of torch.cuda's: streams, events, generators, device properties."""

import contextlib
import resource
import sys
import time
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import psutil
import torch

CPU = torch.device("cpu")


def asked_by_megatron(depth: int = 2) -> bool:
    """True when the caller's caller is Megatron code or the training script.

    torch itself must keep hearing the truth: its optimizers and its DataLoader would otherwise look for a driver.

    Args:
        depth: frames between this function and the code that asks.
    """
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name in ("megatron", "__main__") or name.startswith("megatron.")


class Stream:
    """A stream on which everything is already in order: a CPU runs operations as they are called."""

    cuda_stream = 0
    device = CPU

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event if event is not None else Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass


class Event:
    """An event that has happened as soon as it is recorded; it keeps the host's time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._recorded_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._recorded_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: "Event") -> float:
        """Milliseconds from this event to ``end_event``, as in torch.cuda."""
        if self._recorded_s is None or end_event._recorded_s is None:
            raise ValueError("both events must be recorded before elapsed_time")
        return (end_event._recorded_s - self._recorded_s) * 1000.0


THE_STREAM = Stream()


class Generators:
    """``torch.cuda.default_generators``: whatever the index, the CPU generator."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def null_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Stands for ``torch.cuda.stream`` and ``torch.cuda.device``; may be entered again."""
    return contextlib.nullcontext()


def nothing(*_: Any, **__: Any) -> None:
    """Stands for calls that have no meaning on a CPU."""


def resident_bytes(*_: Any, **__: Any) -> int:
    """Resident set of this process now, in bytes."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes(*_: Any, **__: Any) -> int:
    """Largest resident set of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    """Any statistic may be asked for; none is kept."""
    return defaultdict(int)


def device_properties(*_: Any, **__: Any) -> SimpleNamespace:
    """What ``get_device_properties`` is asked for.

    ``major`` is that of the newest architecture Megatron knows: from there on it no longer asks for
    CUDA_DEVICE_MAX_CONNECTIONS=1, which orders kernels on a GPU and means nothing here.
    """
    return SimpleNamespace(
        name="cpu",
        major=10,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=torch.get_num_threads(),
    )


def get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    """The state of the one generator there is."""
    return torch.default_generator.get_state()


def set_rng_state(new_state: torch.Tensor, *_: Any, **__: Any) -> None:
    """Sets the state of the one generator there is."""
    torch.default_generator.set_state(new_state)


def manual_seed(seed: int) -> None:
    """Seeds the one generator there is."""
    torch.default_generator.manual_seed(int(seed))
