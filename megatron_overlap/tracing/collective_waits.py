"""The waits of everybody else who uses torch.distributed in this process: Megatron's own collectives, mostly."""

from __future__ import annotations

import sys
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.tracing.events import Kind, Trace

# Waits of this package are counted where they happen, with the message that they are for.
_OURS = "megatron_overlap.comm."
_TORCH = "torch.distributed."


class CollectiveWaits:
    """Times every `Work.wait`, through which blocking collectives of gloo go as well as handles that are waited for.

    On CUDA such a wait orders streams and takes the host no time: it is not measured there.

    Args:
        trace: gets an `OTHER_WAIT` for each.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._names: dict[tuple[CodeType, bool], int] = {}
        self._original: Any = None

    def install(self) -> None:
        """Begins."""
        original = self._original = dist.Work.wait
        trace = self._trace

        def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe(1)
            if frame.f_globals.get("__name__", "").startswith(_OURS):
                return original(work, *args, **kwargs)
            start = trace.clock()
            try:
                return original(work, *args, **kwargs)
            finally:
                trace.add(Kind.OTHER_WAIT, start, trace.clock(), op=self._name(frame))

        setattr(dist.Work, "wait", wait)  # noqa: B010 - mypy knows no other way

    def remove(self) -> None:
        """Ends: the class is as it was found."""
        if self._original is not None:
            setattr(dist.Work, "wait", self._original)  # noqa: B010
            self._original = None

    def _name(self, frame: FrameType) -> int:
        """`all_reduce forward`: the collective, or the function that waits for a handle, and the pass."""
        backward = torch._C._current_graph_task_id() != -1
        key = (frame.f_code, backward)
        if key not in self._names:
            name = frame.f_code.co_name
            if not frame.f_globals.get("__name__", "").startswith(_TORCH):
                name = f"handle in {frame.f_code.co_qualname}"
            self._names[key] = self._trace.name(f"{name} {'backward' if backward else 'forward'}")
        return self._names[key]
