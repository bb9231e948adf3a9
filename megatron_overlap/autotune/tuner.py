"""Chooses how each linear layer of a group is run, by measuring what could run it in the training itself.

See `docs/choice.md`. What is tried next follows from `autotune.search`, alike on all ranks; here calls are served,
timed
and agreed upon.
"""

from __future__ import annotations

import json
import math
import platform
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.autotune.cache import ChoiceCache, Entry
from megatron_overlap.autotune.candidates import HOPPER, STOCK, Call, Candidate, fused_variants, one_knob_apart
from megatron_overlap.autotune.microbench import probe
from megatron_overlap.autotune.predict import Costs, predict_us, shortlist
from megatron_overlap.autotune.search import Decider, Settled, Stage, Turn
from megatron_overlap.autotune.stats import Timing
from megatron_overlap.autotune.timer import Samples, time_call
from megatron_overlap.comm import Transport
from megatron_overlap.comm.host_group import HostGroup

_FEWEST = 2


class AutotuneError(RuntimeError):
    """The ranks of a group do not run the same layers in the same order."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What stands now for one kind of call; times are microseconds of the slowest rank, NaN where not measured.

    Attributes:
        call: the kind of call; of layers without sequence parallelism the first that was seen of those chosen together.
        candidate: what serves it now.
        us: its time, and `stock_us` that of Megatron's own path.
        stage: where the measurement is.
        why: what the choice rests on.
        tried: everything that is or was measured.
        withdrawals: how often a choice was given up for Megatron's own path.
    """

    call: Call
    candidate: Candidate
    us: float
    stock_us: float
    stage: Stage
    why: str
    tried: tuple[Candidate, ...]
    withdrawals: int


class Autotuner:
    """The choices for one group. All ranks call `serve` for the same calls in the same order, as layers are run.

    Args:
        group: the ranks.
        transport: what their point-to-point messages take.
        folder: where choices are kept; None keeps none.
        versions: of what a choice depends on, for the cache.
        timeout_s: deadline of an message between the ranks.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        transport: Transport,
        *,
        folder: Path | None,
        versions: Mapping[str, str],
        timeout_s: float,
    ) -> None:
        self._group, self._transport = group, transport
        self._folder, self._versions = folder, dict(versions)
        self._host_group = HostGroup(group, timeout_s=timeout_s, name="autotuner")
        self._costs: dict[tuple[torch.dtype, torch.device], Costs] = {}
        self._caches: dict[torch.device, ChoiceCache | None] = {}
        self._kinds: dict[object, _Kind] = {}

    def serve(
        self,
        call: Call,
        run: Callable[[Candidate], Any],
        leaves: Sequence[torch.Tensor],
        possible: Callable[[], Sequence[Candidate]],
        *,
        measured: bool = True,
    ) -> tuple[Any, Candidate]:
        """Runs one call as it is its turn.

        Args:
            call: what it is.
            run: runs it as a candidate says; returns the output, or a tuple that begins with it.
            leaves: input, weight and bias: where its part of the graph begins.
            possible: candidates besides Megatron's own path, the default first; asked once a kind of call.
            measured: False for a call that takes longer than others do, on all ranks: what is chosen now serves it.

        Returns:
            What `run` returned, and the candidate that served.

        Raises:
            AutotuneError: another rank called something else.
        """
        # Without sequence parallelism gradient work moves from layer to layer (ops/deferred_wgrad.py): what one layer
        # gains
        # another one pays, and only all of them together can be compared.
        name: object = ("sums", call.rows, call.dtype, call.backward) if call.sums else call
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = self._open(call, leaves[0], possible())
        if not measured:
            candidate = kind.candidates[kind.decider.choice.candidate]
            return run(candidate), candidate
        if call == kind.call:
            while kind.decider.due:
                self._agree(kind)
            kind.turn = kind.decider.next()
        candidate = kind.candidates[kind.turn.candidate]
        if not kind.turn.timed:
            return run(candidate), candidate
        samples = kind.samples_of(call, kind.turn.candidate)
        return time_call(samples, lambda: run(candidate), leaves, leaves[0].device), candidate

    def decider(self, call: Call) -> Decider | None:
        """What decides about a kind of call alone; None before its first call, and where it is chosen with others."""
        kind = self._kinds.get(call)
        return None if kind is None else kind.decider

    def verdicts(self) -> list[Verdict]:
        """What stands now for every kind of call that was seen, in the order of the first calls."""
        found = []
        for kind in self._kinds.values():
            choice, decider = kind.decider.choice, kind.decider
            found.append(
                Verdict(
                    kind.call,
                    kind.candidates[choice.candidate],
                    choice.us,
                    choice.stock_us,
                    decider.stage,
                    choice.why,
                    tuple(kind.candidates[each] for each in decider.tried),
                    decider.withdrawals,
                )
            )
        return found

    def costs(self, dtype: torch.dtype, device: torch.device) -> Costs:
        """What was measured for the prediction, measured by the first call, which all ranks make."""
        key = (dtype, device)
        if key not in self._costs:
            self._costs[key] = probe(self._group, self._transport, self._host_group, dtype, device)
        return self._costs[key]

    def _open(self, call: Call, x: torch.Tensor, possible: Sequence[Candidate]) -> _Kind:
        """Agrees on the candidates and on what is known: rank 0's word counts, for its disk may differ."""
        costs = self.costs(x.dtype, x.device)
        if x.device not in self._caches:
            self._caches[x.device] = self._open_cache(x.device)
        word: dict[str, Any] = {"key": call.key}
        if self._host_group.rank == 0:
            tried = shortlist(costs, call, possible, x.itemsize)
            stock_us = predict_us(costs, call, STOCK, x.itemsize)
            likely = stock_us > predict_us(costs, call, tried[0], x.itemsize)
            word |= {"tried": [each.as_dict() for each in tried], "seed": int(likely), "known": None}
            variants = _variants(call, possible)
            word["variants"] = [each.as_dict() for each in variants]
            entry = self._known(call.key, costs.felt_rate, [*possible, *variants])
            if entry is not None:
                word["known"] = entry.as_dict()
        words = [json.loads(text) for text in self._host_group.all_gather_text(json.dumps(word))]
        keys = [each["key"] for each in words]
        if any(key != keys[0] for key in keys):
            raise AutotuneError(
                f"ranks of a tensor parallel group run different layers: {' | '.join(keys)}; set overlap.tensor.method "
                "to none and report this"
            )
        first = words[0]
        candidates = [STOCK, *(Candidate.of(tree) for tree in first["tried"])]
        num_first = len(candidates)
        candidates += [each for each in map(Candidate.of, first["variants"]) if each not in candidates]
        known = None
        if first["known"] is not None:
            entry = Entry.of(first["known"])
            if entry.candidate not in candidates:
                candidates.append(entry.candidate)
            known = Settled(candidates.index(entry.candidate), entry.us, entry.stock_us, "cached")
        near = {
            index: [other for other, apart in enumerate(candidates) if one_knob_apart(each, apart)]
            for index, each in enumerate(candidates)
            if each.method == "fused"
        }
        decider = Decider(num_first, seed=first["seed"], known=known, near=near)
        return _Kind(call, candidates, decider, costs.felt_rate)

    def _known(self, key: str, link_rate: float, possible: Sequence[Candidate]) -> Entry | None:
        cache = next(iter(self._caches.values()))
        entry = cache.get(key) if cache is not None else None
        if entry is None or not entry.fits(link_rate) or entry.candidate not in (STOCK, *possible):
            return None
        return entry

    def _open_cache(self, device: torch.device) -> ChoiceCache | None:
        hosts = self._host_group.all_gather_text(socket.gethostname())
        if self._folder is None or self._host_group.rank != 0:
            return None
        cuda = device.type == "cuda"
        return ChoiceCache(
            self._folder,
            {
                **self._versions,
                "torch": torch.__version__,
                "device": torch.cuda.get_device_name(device) if cuda else _processor(),
                "threads": str(torch.get_num_threads()),
                "backend": dist.get_backend(self._group),
                "ranks": str(len(hosts)),
                "ranks by host": " ".join(str(hosts.count(host)) for host in dict.fromkeys(hosts)),
            },
        )

    def _agree(self, kind: _Kind) -> None:
        decider, before = kind.decider, kind.decider.choice
        mine = kind.passes()
        calls = zip(*self._host_group.all_gather_floats([us for times in mine for us in times]), strict=True)
        decider.take(kind.timings([Timing.slowest(islice(calls, len(times)), _FEWEST) for times in mine]))
        if decider.epoch != kind.epoch:
            kind.epoch, kind.samples = decider.epoch, {}
        choice = decider.choice
        if choice == before or math.isnan(choice.us) or math.isnan(choice.stock_us):
            return
        for cache in self._caches.values():
            if cache is not None:
                entry = Entry(kind.candidates[choice.candidate], choice.us, choice.stock_us, kind.link_rate)
                cache.put(kind.call.key, entry)


class _Kind:
    """The calls that are served alike, and what was measured of them."""

    def __init__(self, call: Call, candidates: Sequence[Candidate], decider: Decider, link_rate: float) -> None:
        self.call, self.candidates, self.decider, self.link_rate = call, list(candidates), decider, link_rate
        self.turn = Turn(decider.choice.candidate)
        self.epoch = decider.epoch
        self.samples: dict[Call, dict[int, Samples]] = {}

    def samples_of(self, call: Call, candidate: int) -> Samples:
        return self.samples.setdefault(call, {}).setdefault(candidate, Samples())

    def passes(self) -> list[list[float]]:
        """What this rank measured of each call, of each candidate that is wanted, forward and backward.

        As many of each on all ranks: they run the same calls.
        """
        return [
            times
            for call, by_candidate in self.samples.items()
            for each in self.decider.wanted
            for times in by_candidate.get(each, Samples()).passes(call.backward)
        ]

    def timings(self, passes: Sequence[Timing]) -> list[Timing]:
        """What a call takes, or one of each together, of each candidate that is wanted; NaN where one is not known.

        Args:
            passes: what all ranks measured of each entry of `passes()`.
        """
        left, wanted = iter(passes), self.decider.wanted
        parts: list[list[Timing]] = []
        for call in self.samples:
            times = [Timing.total(list(islice(left, 1 + call.backward))) for _ in wanted]
            # A layer that comes once a pass may lack some: it is left out for all.
            if not any(math.isnan(each.us) for each in times):
                parts.append(times)
            elif call == self.call:
                return [Timing(math.nan)] * len(wanted)
        if not parts:
            return [Timing(math.nan)] * len(wanted)
        return [Timing.total(of_calls) for of_calls in zip(*parts, strict=True)]


def _variants(call: Call, possible: Sequence[Candidate]) -> list[Candidate]:
    """Ways to run fused kernels, where they can: those like the best so far are tried when it is one of them."""
    fused = [each for each in possible if each.method == "fused"]
    return fused_variants(call, HOPPER in fused) if fused else []


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
