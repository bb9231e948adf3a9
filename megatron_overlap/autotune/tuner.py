"""Selects the candidate of each kind of call of a group by timing the calls of the training itself.

`autotune.search` names the candidate of each call, the same on all ranks. This module runs and times the calls without
a synchronisation, and exchanges the times. See `docs/design/autotuning.md`.
"""

import json
import math
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_overlap.autotune.candidates import EXPERTS, FUSED, HOPPER, STOCK, AutotuneCache, Call, Candidate
from megatron_overlap.autotune.search import Search, Selection, Step, Timing
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.schedules.heuristics import fused_settings, one_knob_apart

_MIN_CALLS = 2
_MAX_NODES = 32
MAX_KINDS = 1024
"""Kinds of calls of a group that are measured. Rows that change in every step would add kinds, and exchanges of the
ranks, without end."""


class AutotuneError(RuntimeError):
    """The ranks of a group do not run the same layers in the same order."""


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


type End = Literal["nodes", "input", "pass"]
"""The end of the backward of a call: its last node, the gradient of its first leaf, or the end of the backward pass."""

type Samples = tuple[list[Span], list[Span]]  # the timed calls in their order, forward and backward


@dataclass(slots=True)
class Kind:
    """Calls that run the same candidate; without sequence parallelism all layers of one number of rows.

    `call` is the first one; the search makes one step whenever it repeats. `samples` are those of the present search.
    """

    call: Call
    search: Search[Candidate]
    step: Step[Candidate] = Step(STOCK)
    samples: dict[Call, dict[Candidate, Samples]] = field(default_factory=dict)

    def passes(self) -> list[list[float]]:
        """This rank's times of each call and wanted candidate, forward and backward; as many of each on all ranks."""
        return [
            [span.us() for span in spans]
            for call, samples in self.samples.items()
            for each in self.search.wanted
            for spans in samples.get(each, ([], []))[: 1 + call.backward]
        ]

    def total(self, passes: Sequence[Timing]) -> list[Timing]:
        """The time of all calls together for each wanted candidate, from the group's timing of each of `passes`."""
        rest, wanted = iter(passes), self.search.wanted
        calls = [[Timing.total(list(islice(rest, 1 + call.backward))) for _ in wanted] for call in self.samples]
        # A layer that runs once a pass may lack times. It is left out for all candidates, unless it is the first.
        known = [call for call in calls if not any(math.isnan(each.us) for each in call)]
        if not known or known[0] is not calls[0]:
            return [Timing(math.nan)] * len(wanted)
        return [Timing.total(each) for each in zip(*known, strict=True)]


class Autotuner:
    """The autotuner of one group. All ranks call `run` for the same calls in the same order, as layers run.

    `folder` has the cache, if it is not None. A selection depends on `versions`. `timeout_s` is the deadline of an
    exchange between the ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, folder: Path | None, versions: dict[str, str], timeout_s: float
    ) -> None:
        self._group, self._folder, self._versions = group, folder, versions
        self._host = HostGroup(group, timeout_s=timeout_s, name="autotuner")
        self._cache: AutotuneCache | None = None
        self.kinds: dict[object, Kind] = {}

    def run(
        self,
        call: Call,
        run: Callable[[Candidate], Any],
        leaves: Sequence[torch.Tensor],
        candidates: Callable[[], Sequence[Candidate]],
        *,
        timed: bool = True,
        modelled: Candidate | None = None,
    ) -> tuple[Any, Candidate]:
        """Runs one call; returns the result of `run`, and its candidate.

        Args:
            run: runs the call with a candidate; returns the output, or a tuple that begins with it.
            leaves: input and weight: the graph of the call ends there.
            candidates: of the call, the base first; called once for each kind.
            timed: False on all ranks for a call that takes longer than others. It runs the selected candidate.
            modelled: candidate that runs until the first recheck measures all; None measures them at once.

        After `MAX_KINDS` further kinds run `modelled`, or the base.

        Raises AutotuneError if another rank runs another call.
        """
        # Without sequence parallelism weight gradients move from layer to layer (ops/wgrad.py): one layer pays
        # for the gain of another, so only the sum over all layers can be compared.
        name = ("all_reduce", call.rows, call.dtype, call.backward) if call.all_reduces else call
        kind = self.kinds.get(name)
        if kind is None:
            # A block has a kind for the rows of its linear layers, which are measured.
            if len(self.kinds) >= MAX_KINDS and call.op != "block":
                candidate = modelled or candidates()[0]
                return run(candidate), candidate
            kind = self.kinds[name] = self._open(call, candidates(), leaves[0].device, modelled)
        if timed and call == kind.call:
            while kind.search.due:
                self._exchange(kind)
            kind.step = kind.search.next()
        candidate, is_timed = kind.step if timed else Step(kind.search.selected.candidate)
        if not is_timed:
            return run(candidate), candidate
        samples = kind.samples.setdefault(call, {}).setdefault(candidate, ([], []))
        end: End = "pass" if call.op == "block" else "input" if call.op == EXPERTS else "nodes"
        return _time_call(samples, partial(run, candidate), leaves, end), candidate

    def slowest(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks of the group. Collective."""
        return [max(each) for each in zip(*self._host.all_gather_floats(values), strict=True)]

    def _open(
        self, call: Call, candidates: Sequence[Candidate], device: torch.device, modelled: Candidate | None
    ) -> Kind:
        if not self.kinds:
            self._cache = self._open_cache(device)
        fused = fused_settings(self._host.size, call.rows, hopper=HOPPER in candidates) if FUSED in candidates else ()
        variants = [Candidate("fused", knobs=knobs) for knobs in fused]
        mine = f"{call.key} by {', '.join(map(str, candidates))}"
        entry = None if self._cache is None else self._cache.get(call.key)
        words = [json.loads(text) for text in self._host.all_gather_text(json.dumps([mine, entry]))]
        if any(theirs != mine for theirs, _ in words):
            calls = " | ".join(theirs for theirs, _ in words)
            section = "expert" if call.op == EXPERTS else "tensor"
            remedy = f"set overlap.{section}.method to none and report it"
            raise AutotuneError(f"ranks run different layers: {calls}; {remedy}")
        # All ranks take the cached selection of rank 0: other ranks may have another disk.
        name, *rest = words[0][1] or (None,)
        by_name = {str(each): each for each in (*candidates, *variants)}
        cached = None if modelled is None else Selection(modelled, reason="modelled")
        if name in by_name:
            cached = Selection(by_name[name], *rest)

        def neighbours(candidate: Candidate) -> list[Candidate]:
            return [v for v in variants if candidate.method == v.method and one_knob_apart(candidate.knobs, v.knobs)]

        return Kind(call, Search(candidates, cached=cached, neighbours=neighbours))

    def _open_cache(self, device: torch.device) -> AutotuneCache | None:
        hosts = self._host.all_gather_text(socket.gethostname())
        if self._folder is None or self._host.rank != 0:
            return None
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else torch.backends.cpu.get_cpu_capability()
        environment = {
            "torch": torch.__version__,
            "device": name,
            "threads": str(torch.get_num_threads()),
            "backend": dist.get_backend(self._group),
            "ranks by host": " ".join(str(hosts.count(host)) for host in dict.fromkeys(hosts)),
        }
        return AutotuneCache(self._folder, self._versions | environment)

    def _exchange(self, kind: Kind) -> None:
        search, before, wanted, mine = kind.search, kind.search.selected, kind.search.wanted, kind.passes()
        calls = zip(*self._host.all_gather_floats([us for times in mine for us in times]), strict=True)
        search.record(kind.total([Timing.slowest(islice(calls, len(times)), _MIN_CALLS) for times in mine]))
        if not search.wanted or not {*search.wanted} <= {*wanted}:
            kind.samples = {}
        candidate, us, stock_us, reason = search.selected
        if self._cache is not None and search.selected != before and not math.isnan(us + stock_us):
            self._cache.put(kind.call.key, Selection(str(candidate), us, stock_us, reason))


def _time_call(samples: Samples, run: Callable[[], Any], leaves: Sequence[torch.Tensor], end: End) -> Any:
    """Runs a call, adds its times to `samples`, and returns its result.

    Hooks time the backward from before the first node that the call added to the autograd graph until its `end`.
    Gradient accumulation into parameters is not included, unless weight gradients are deferred (`ops.wgrad`). On CUDA
    the marks are events.
    """

    # A hook of a leaf that referred to it would be a cycle that the garbage collector cannot see.
    on_cuda = leaves[0].is_cuda

    def mark() -> Any:
        if on_cuda:
            return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))
        return time.perf_counter_ns()

    forward, backward = Span(mark()), Span()
    result = run()
    forward.stop = mark()
    samples[0].append(forward)
    output = result[0] if isinstance(result, tuple) else result
    if output.grad_fn is None:
        return result

    def stop(*_: Any) -> None:
        backward.stop = mark()

    def stop_at_end(_: torch.Tensor) -> None:
        handle.remove()
        # Deferred weight gradients that no layer has computed run as earlier callbacks.
        torch.autograd.Variable._execution_engine.queue_callback(stop)

    samples[1].append(backward)
    output.grad_fn.register_prehook(lambda grads: setattr(backward, "start", mark()))
    if end == "nodes" or not leaves[0].requires_grad:
        for node in _nodes(output.grad_fn, leaves):
            node.register_hook(stop)
    elif end == "input":
        leaves[0].register_hook(stop)
    else:
        handle = leaves[0].register_hook(stop_at_end)
    return result


def _nodes(last: Any, leaves: Sequence[torch.Tensor]) -> list[Any]:
    """The graph nodes from `last` down to those that produced the leaves, which are not included."""
    ends = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad]
    found: list[Any] = []
    waiting = [last]
    for node in waiting:  # the loop appends to this list
        # A node without a next one accumulates into a parameter.
        if node is not None and node.next_functions and node not in (*ends, *found) and len(found) < _MAX_NODES:
            found.append(node)
            waiting += [following for following, _ in node.next_functions]
    return found
