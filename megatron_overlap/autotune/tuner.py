"""Selects the candidate of each linear layer of a group by timing the calls of the training itself.

`autotune.search` names the candidate of each call, the same on all ranks. This module runs and times the calls, and
exchanges the times. See `docs/design/autotuning.md`.
"""

from __future__ import annotations

import json
import math
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.autotune.cache import AutotuneCache, Entry
from megatron_overlap.autotune.candidates import HOPPER, STOCK, Call, Candidate, fused_variants, one_knob_apart
from megatron_overlap.autotune.search import Search, Selection, Step
from megatron_overlap.autotune.stats import Timing
from megatron_overlap.autotune.timer import Samples, time_call
from megatron_overlap.comm.host_group import HostGroup

_MIN_CALLS = 2


class AutotuneError(RuntimeError):
    """The ranks of a group do not run the same layers in the same order."""


@dataclass(slots=True)
class Kind:
    """Calls that run the same candidate; without sequence parallelism all layers of one number of rows.

    Attributes:
        call: the first call that was seen. Each of its calls begins the next step.
        search: names the candidates.
        samples: of the current epoch of `search`, for each call.
    """

    call: Call
    search: Search[Candidate]
    step: Step[Candidate] = Step(STOCK)
    epoch: int = 0
    samples: dict[Call, dict[Candidate, Samples]] = field(default_factory=dict)

    def passes(self) -> list[list[float]]:
        """This rank's times of each call and wanted candidate, forward and backward; as many of each on all ranks."""
        return [
            [span.us() for span in spans]
            for call, samples in self.samples.items()
            for each in (samples.get(wanted, Samples()) for wanted in self.search.wanted)
            for spans in [each.forward, *([each.backward] if call.backward else [])]
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

    Args:
        group: the ranks.
        folder: of the cache; None keeps no cache.
        versions: that a selection depends on.
        timeout_s: deadline of an exchange between the ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup, *, folder: Path | None, versions: Mapping[str, str], timeout_s: float
    ) -> None:
        self._group, self._folder, self._versions = group, folder, dict(versions)
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
    ) -> tuple[Any, Candidate]:
        """Runs one call.

        Args:
            call: its kind.
            run: runs the call with a candidate; returns the output, or a tuple that begins with it.
            leaves: input and weight: the graph of the call ends there.
            candidates: the candidates beside the stock path; called once for each kind.
            timed: False on all ranks for a call that takes longer than others. It runs the selected candidate.

        Returns:
            The result of `run`, and its candidate.

        Raises:
            AutotuneError: another rank runs another call.
        """
        # Without sequence parallelism weight gradients move from layer to layer (ops/wgrad.py): one layer pays
        # for the gain of another, so only the sum over all layers can be compared.
        name = ("all_reduce", call.rows, call.dtype, call.backward) if call.all_reduces else call
        kind = self.kinds.get(name)
        if kind is None:
            kind = self.kinds[name] = self._open(call, candidates(), leaves[0].device)
        if not timed:
            candidate = kind.search.selected.candidate
            return run(candidate), candidate
        if call == kind.call:
            while kind.search.due:
                self._exchange(kind)
            kind.step = kind.search.next()
        candidate = kind.step.candidate
        if not kind.step.timed:
            return run(candidate), candidate
        samples = kind.samples.setdefault(call, {}).setdefault(candidate, Samples())
        return time_call(samples, partial(run, candidate), leaves), candidate

    def _open(self, call: Call, candidates: Sequence[Candidate], device: torch.device) -> Kind:
        if not self.kinds:
            self._cache = self._open_cache(device)
        candidates = [STOCK, *candidates]
        variants = fused_variants(call, hopper=HOPPER in candidates) if Candidate("fused") in candidates else []
        mine = f"{call.key} by {', '.join(map(str, candidates))}"
        entry = None if self._cache is None else self._cache.get(call.key)
        words = [json.loads(text) for text in self._host.all_gather_text(json.dumps([mine, entry]))]
        if any(theirs != mine for theirs, _ in words):
            calls = " | ".join(theirs for theirs, _ in words)
            raise AutotuneError(
                f"ranks of a tensor-parallel group run different layers: {calls}; set overlap.tensor.method to none "
                "and report this"
            )
        # All ranks take the cached selection of rank 0: other ranks may have another disk.
        name, us, stock_us = words[0][1] or (None, math.nan, math.nan)
        by_name = {str(each): each for each in (*candidates, *variants)}
        cached = Selection(by_name[name], us, stock_us, "cached") if name in by_name else None

        def neighbours(candidate: Candidate) -> list[Candidate]:
            return [each for each in variants if one_knob_apart(candidate, each)]

        return Kind(call, Search(candidates, cached=cached, neighbours=neighbours))

    def _open_cache(self, device: torch.device) -> AutotuneCache | None:
        hosts = self._host.all_gather_text(socket.gethostname())
        if self._folder is None or self._host.rank != 0:
            return None
        environment = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
            "threads": str(torch.get_num_threads()),
            "backend": dist.get_backend(self._group),
            "ranks by host": " ".join(str(hosts.count(host)) for host in dict.fromkeys(hosts)),
        }
        return AutotuneCache(self._folder, self._versions | environment)

    def _exchange(self, kind: Kind) -> None:
        search, before, mine = kind.search, kind.search.selected, kind.passes()
        calls = zip(*self._host.all_gather_floats([us for times in mine for us in times]), strict=True)
        search.record(kind.total([Timing.slowest(islice(calls, len(times)), _MIN_CALLS) for times in mine]))
        if search.epoch != kind.epoch:
            kind.epoch, kind.samples = search.epoch, {}
        selected = search.selected
        if self._cache is not None and selected != before and not math.isnan(selected.us + selected.stock_us):
            self._cache.put(kind.call.key, Entry(str(selected.candidate), selected.us, selected.stock_us))


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
