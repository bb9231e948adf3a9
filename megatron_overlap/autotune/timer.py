"""Times one call of a layer, forward and backward, without a synchronisation.

Autograd calls the backward. Hooks on the nodes that the call added to the graph time it, from before the first node
until after the last. Gradient accumulation into parameters is not included. On CUDA the marks are events; a time is NaN
until the device has reached both.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_MAX_NODES = 32


@dataclass(slots=True)
class Span:
    """The time between two marks: nanoseconds of the host, or CUDA events."""

    start: Any = None
    stop: Any = None

    def us(self) -> float:
        """Microseconds; NaN until both marks are passed."""
        if self.start is None or self.stop is None:
            return math.nan
        if isinstance(self.start, int):
            return (self.stop - self.start) / 1e3
        return self.start.elapsed_time(self.stop) * 1e3 if self.stop.query() else math.nan


@dataclass(slots=True)
class Samples:
    """The timed calls of one candidate, in their order."""

    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)


def time_call(samples: Samples, run: Callable[[], Any], leaves: Sequence[torch.Tensor]) -> Any:
    """Runs a call, adds its times to `samples`, and returns its result.

    Args:
        samples: of the candidate that runs.
        run: the call; returns the output, or a tuple that begins with it.
        leaves: input and weight: the graph of the call ends there.
    """

    def mark() -> Any:
        if not leaves[0].is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    forward, backward = Span(mark()), Span()
    result = run()
    forward.stop = mark()
    samples.forward.append(forward)
    output = result[0] if isinstance(result, tuple) else result
    if output.grad_fn is not None:
        samples.backward.append(backward)
        output.grad_fn.register_prehook(lambda grads: setattr(backward, "start", mark()))
        for node in _nodes(output.grad_fn, leaves):
            node.register_hook(lambda inputs, outputs: setattr(backward, "stop", mark()))
    return result


def _nodes(last: Any, leaves: Sequence[torch.Tensor]) -> list[Any]:
    """The graph nodes from `last` down to those that produced the leaves, which are not included."""
    ends = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad]
    found: list[Any] = []
    waiting = [last]
    while waiting and len(found) < _MAX_NODES:
        node = waiting.pop(0)
        # A node without a next one accumulates into a parameter.
        if node is None or not node.next_functions or any(node is other for other in (*ends, *found)):
            continue
        found.append(node)
        waiting += [following for following, _ in node.next_functions]
    return found
