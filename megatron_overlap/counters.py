"""Counts overlapped calls, fallbacks with their reasons, and sent bytes of one rank.

The adapters count; `session_report.py` shows the counts. All counters are safe to use from autograd's threads.
"""

import copy
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Direction = Literal["forward", "forward only", "skipped forward", "dgrad", "wgrad"]
"""The pass. `forward only`: no backward pass follows (evaluation, generation, log-probabilities). `skipped forward`: a
recomputed one whose output is not read."""


class FallbackError(ValueError):
    """A call would run the stock path, and the config has `strict: true`."""


class Site(NamedTuple):
    """What a tally counts: the module's kind, its name or shape, the operation and the pass."""

    kind: str
    name: str
    op: str
    direction: Direction

    @property
    def module(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def feature(self) -> str:
        """The section of `overlap` that the calls belong to."""
        if self.kind in ("data", "expert"):
            return self.kind
        return {"ulysses": "ulysses", "ulysses_layer": "ulysses", "balanced_attention": "varlen"}.get(self.op, "tensor")


@dataclass
class Tally:
    """The counts of calls of one site. Those of the last two fields are no fallbacks."""

    overlapped: int = 0
    moved_bytes: int = 0  # that this rank sent in overlapped calls
    fallbacks: Counter[str] = field(default_factory=Counter)  # calls that ran the stock path, by reason
    not_fused: Counter[str] = field(default_factory=Counter)  # ran p2p although the config asks for fused, by reason
    stock_selected: int = 0  # ran the stock path because autotuning selected or measured it
    not_communicating: int = 0  # communicate nothing in this pass


@dataclass(frozen=True)
class AutotuneLine:
    """What `method: auto` selected for the calls of one shape."""

    module: str  # kind and shape of the layer, such as `column 1024->2816`
    op: str
    rows: int
    dtype: str
    passes: str  # those that were measured together
    method: str  # runs these calls now
    ms: float | None  # time of `method`; None where it was not measured
    stock_ms: float | None  # that of the stock path
    reason: str  # the measurement behind the selection, or why other candidates were excluded

    @property
    def gain(self) -> float | None:
        """Speedup over the stock path minus one: 0.25 is a quarter faster."""
        return None if self.ms is None or self.stock_ms is None else self.stock_ms / self.ms - 1


class SymmetricMemory(NamedTuple):
    """Symmetric memory that one group holds for fused kernels on this rank."""

    num_ranks: int
    num_bytes: int
    bound_bytes: int  # twice the largest gathered activation of the group
    portable: Mapping[str, int]  # GEMMs that ran the portable kernel instead of the one for Hopper, by reason


class Counters:
    """All counts of one session on this rank; `strict`: every fallback raises a `FallbackError`."""

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        # What `method: auto` selected so far.
        self.autotune_lines: list[Callable[[], tuple[AutotuneLine, ...]]] = []
        # None unless the config asks for fused kernels.
        self.symmetric_memory: Callable[[], list[SymmetricMemory]] | None = None
        self.excluded: dict[str, str] = {}  # modules that no method overlaps, with the reason; never an error
        # As in `session_report.Report`.
        self.numerics_check: dict[str, float] = {}
        self.transports: dict[str, str] = {}
        self._tallies = defaultdict[Site, Tally](Tally)
        self._lock = threading.Lock()

    def overlapped(self, kind: str, name: str, op: str, direction: Direction, num_bytes: int = 0) -> None:
        """Counts one overlapped call and the bytes that it sent."""
        with self._lock:
            tally = self._tallies[Site(kind, name, op, direction)]
            tally.overlapped += 1
            tally.moved_bytes += num_bytes

    def fallback(self, kind: str, name: str, op: str, direction: Direction, reason: str) -> None:
        """Counts one call that falls back to the stock path; raises a `FallbackError` if the counters are strict."""
        remedy = "remove the cause, or set overlap.strict to false to run the stock path"
        site = Site(kind, name, op, direction)
        self._count(site, self.tally(*site).fallbacks, reason, f"not overlapped: {reason}; {remedy}")

    def not_fused(self, kind: str, name: str, op: str, direction: Direction, reason: str) -> None:
        """Counts one call that runs p2p although the config asks for fused kernels; raises as `fallback`."""
        remedy = "set overlap.tensor.method to p2p, or overlap.strict to false"
        site = Site(kind, name, op, direction)
        self._count(site, self.tally(*site).not_fused, reason, f"not fused: {reason}; {remedy}")

    def _count(self, site: Site, counts: Counter[str], reason: str, error: str) -> None:
        with self._lock:
            counts[reason] += 1
        if self.strict:
            raise FallbackError(f"{site.module}: {site.op} {site.direction}: {error}")

    def stock_selected(self, kind: str, name: str, op: str, direction: Direction) -> None:
        """Counts one call that runs the stock path because autotuning selected or measured it."""
        with self._lock:
            self._tallies[Site(kind, name, op, direction)].stock_selected += 1

    def not_communicating(self, kind: str, name: str, op: str, direction: Direction) -> None:
        with self._lock:
            self._tallies[Site(kind, name, op, direction)].not_communicating += 1

    def tally(self, kind: str, name: str, op: str, direction: Direction) -> Tally:
        """The tally of one site, for callers on the training thread that add to it without a lock."""
        with self._lock:
            return self._tallies[Site(kind, name, op, direction)]

    def exclude(self, module: str, reason: str) -> None:
        self.excluded[module] = reason

    def snapshot(self) -> dict[Site, Tally]:
        """A copy of all tallies, sorted by site."""
        with self._lock:
            return {site: copy.deepcopy(tally) for site, tally in sorted(self._tallies.items())}
