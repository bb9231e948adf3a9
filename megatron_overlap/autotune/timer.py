"""How long one call of a layer takes, forward and backward, without standing in its way.

The backward is not ours to call: autograd does. It is timed from hooks on the nodes that the call has put into the
graph, from before the first of them runs until after the last; gradients that are accumulated into parameters, and
Megatron's hooks there, are not in it. On CUDA the marks are events, and nothing waits for them: what the device has
not reached when it is asked for is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_MOST_NODES = 32


@dataclass
class Span:
    """From one mark to another; either may be missing still."""

    start: Any = None
    stop: Any = None

    def us(self) -> float:
        """Microseconds; NaN where a mark is missing or the device is not there yet."""
        if self.start is None or self.stop is None:
            return math.nan
        if isinstance(self.start, int):
            return (self.stop - self.start) / 1e3
        return self.start.elapsed_time(self.stop) * 1e3 if self.stop.query() else math.nan


@dataclass
class Samples:
    """What was measured of one candidate at one place."""

    forward: list[Span] = field(default_factory=list)
    backward: list[Span] = field(default_factory=list)

    def passes(self, with_backward: bool) -> list[list[float]]:
        """Microseconds of the forwards, and of the backwards, in the order of the calls; NaN where not known yet."""
        return [[span.us() for span in spans] for spans in [self.forward] + [self.backward] * with_backward]


def mark(device: torch.device) -> Any:
    """Now: on the host, or where the device's current stream is."""
    if device.type != "cuda":
        return time.perf_counter_ns()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def time_call(
    samples: Samples,
    run: Callable[[], Any],
    leaves: Sequence[torch.Tensor],
    device: torch.device,
) -> Any:
    """Runs a call and adds its spans to `samples`; the backward's is filled in when the backward has run.

    Args:
        samples: what gets the spans.
        run: the call; returns the output, or a tuple that begins with it.
        leaves: the tensors that it was called with, where its part of the graph ends.
        device: of the tensors.
    """
    span = Span(mark(device))
    result = run()
    span.stop = mark(device)
    samples.forward.append(span)
    output = result[0] if isinstance(result, tuple) else result
    if output.grad_fn is not None:
        samples.backward.append(_backward_span(output, leaves, device))
    return result


def _backward_span(output: torch.Tensor, leaves: Sequence[torch.Tensor], device: torch.device) -> Span:
    span = Span()

    def begin(grads: Any) -> None:
        span.start = mark(device)

    def end(grad_inputs: Any, grad_outputs: Any) -> None:
        span.stop = mark(device)

    assert output.grad_fn is not None
    output.grad_fn.register_prehook(begin)
    for node in _nodes(output.grad_fn, leaves):
        node.register_hook(end)
    return span


def _nodes(last: Any, leaves: Sequence[torch.Tensor]) -> list[Any]:
    """The nodes from `last` down to those that the leaves come from, which are not among them."""
    ends = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad]
    found: list[Any] = []
    waiting = [last]
    while waiting and len(found) < _MOST_NODES:
        node = waiting.pop(0)
        # A node without a next one accumulates into a parameter.
        if node is None or not node.next_functions or any(node is other for other in (*ends, *found)):
            continue
        found.append(node)
        waiting += [following for following, _ in node.next_functions]
    return found
