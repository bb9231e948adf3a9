"""Times the waits for collectives outside the plugin, mostly those of Megatron."""

import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import torch

from megatron_overlap.tracing.events import Kind, Trace

# The transports of the plugin record their waits with the message.
_PLUGIN = "megatron_overlap.comm."
_TORCH = "torch.distributed."


def timed_wait(original: Callable[..., Any], trace: Trace) -> Callable[..., Any]:
    """Return a replacement of `torch.distributed.Work.wait` that adds a `COLLECTIVE_WAIT` to `trace` for every call.

    Blocking collectives of gloo also call `wait`. On CUDA a wait orders streams and does not block the host.
    """
    names: dict[tuple[CodeType, bool], int] = {}

    def name_of(frame: FrameType) -> int:
        # The name is the collective, or the function that waits for a handle, and the pass: `all_reduce forward`.
        backward = torch._C._current_graph_task_id() != -1
        key = (frame.f_code, backward)
        if key not in names:
            name = frame.f_code.co_name
            if not frame.f_globals.get("__name__", "").startswith(_TORCH):
                name = f"handle in {frame.f_code.co_qualname}"
            names[key] = trace.name(f"{name} {'backward' if backward else 'forward'}")
        return names[key]

    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        if frame.f_globals.get("__name__", "").startswith(_PLUGIN):
            return original(work, *args, **kwargs)
        start = trace.clock()
        try:
            return original(work, *args, **kwargs)
        finally:
            trace.add(Kind.COLLECTIVE_WAIT, start, trace.clock(), op=name_of(frame))

    return wait
