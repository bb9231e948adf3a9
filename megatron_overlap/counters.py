"""What was overlapped, what was not and why: counted by the adapters, shown by the session's report."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table

from megatron_overlap.saved_activations import SavedActivations, SavedMemory

Direction = Literal["forward", "dgrad", "wgrad"]

_MIB = 1024 * 1024


class FallbackError(ValueError):
    """A call would have run Megatron's own path, and the config says `strict: true`."""


class Site(NamedTuple):
    """Where something is counted: `column`, its name in the model if known, `ag_gemm`, `forward`."""

    kind: str
    name: str
    op: str
    direction: Direction


@dataclass
class Tally:
    """The counts of one site. `moved_bytes` is what this rank sent in its overlapped calls.

    `not_fused` counts overlapped calls that ran p2p where the config asks for fused kernels, by reason. `chosen_stock`
    counts calls that ran Megatron's own path because it was chosen, or to be measured: no fallback.
    """

    overlapped: int = 0
    moved_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    not_fused: dict[str, int] = field(default_factory=dict)
    chosen_stock: int = 0


@dataclass(frozen=True)
class ChoiceLine:
    """What `method: auto` has chosen for the calls of one shape, in a report.

    Attributes:
        module: `column 1024->2816`.
        passes: what was measured together.
        method: what serves these calls now.
        ms: its time, and `stock_ms` that of Megatron's own path; None where it was not measured.
        why: what the choice rests on, and why not otherwise.
    """

    module: str
    op: str
    rows: int
    dtype: str
    passes: str
    method: str
    ms: float | None
    stock_ms: float | None
    why: str

    @property
    def gain(self) -> float | None:
        """How much faster than Megatron's own path: 0.25 is a quarter."""
        return None if self.ms is None or self.stock_ms is None else self.stock_ms / self.ms - 1


class SymmetricMemory(NamedTuple):
    """What one group holds for fused kernels on this rank: its bytes, and twice its largest gathered activation.

    `portable` counts GEMMs that were to run a kernel for Hopper and ran the portable one, by reason.
    """

    num_ranks: int
    num_bytes: int
    bound_bytes: int
    portable: Mapping[str, int]


class Counters:
    """Counts calls; safe to use from autograd's threads.

    Args:
        strict: turns every fallback into a `FallbackError`.
    """

    def __init__(self, strict: bool = False) -> None:
        self.strict = strict
        self.kept = SavedActivations()
        self.choices: Callable[[], tuple[ChoiceLine, ...]] = tuple
        self.symmetric: Callable[[], list[SymmetricMemory]] | None = None
        """Where fused kernels are asked for: what they hold."""
        self._left: dict[str, str] = {}
        self._tallies: dict[Site, Tally] = {}
        self._lock = threading.Lock()

    def overlapped(self, kind: str, name: str, op: str, direction: Direction, num_bytes: int = 0) -> None:
        """Counts one overlapped call and the bytes it sent."""
        site = Site(kind, name, op, direction)
        with self._lock:
            tally = self._tallies.get(site)
            if tally is None:
                tally = self._tallies[site] = Tally()
            tally.overlapped += 1
            tally.moved_bytes += num_bytes

    def fallback(self, kind: str, name: str, op: str, direction: Direction, reason: str) -> None:
        """Counts one call that runs Megatron's own path.

        Raises:
            FallbackError: the counters are strict.
        """
        site = Site(kind, name, op, direction)
        with self._lock:
            fallbacks = self._tallies.setdefault(site, Tally()).fallbacks
            fallbacks[reason] = fallbacks.get(reason, 0) + 1
        if self.strict:
            module = f"{kind} {name}".strip()
            raise FallbackError(
                f"{module}: {op} {direction}: not overlapped: {reason};"
                " remove the cause, or set overlap.strict to false to run Megatron's own path"
            )

    def not_fused(self, kind: str, name: str, op: str, direction: Direction, reason: str) -> None:
        """Counts one call that runs p2p where fused kernels were asked for.

        Raises:
            FallbackError: the counters are strict.
        """
        with self._lock:
            reasons = self._tallies.setdefault(Site(kind, name, op, direction), Tally()).not_fused
            reasons[reason] = reasons.get(reason, 0) + 1
        if self.strict:
            raise FallbackError(
                f"{kind} {name}".strip() + f": {op} {direction}: not fused: {reason};"
                " set overlap.tensor.method to p2p, or overlap.strict to false"
            )

    def chose_stock(self, kind: str, name: str, op: str, direction: Direction) -> None:
        """Counts one call that runs Megatron's own path by choice."""
        tally = self.stock_by_choice(kind, name, op, direction)
        with self._lock:
            tally.chosen_stock += 1

    def stock_by_choice(self, kind: str, name: str, op: str, direction: Direction) -> Tally:
        """What `chose_stock` counts in, for callers on the training thread that have no time."""
        with self._lock:
            return self._tallies.setdefault(Site(kind, name, op, direction), Tally())

    def leave(self, module: str, reason: str) -> None:
        """Notes a module that is left to Megatron on purpose: nothing that could be otherwise, so never an error."""
        self._left[module] = reason

    @property
    def left(self) -> dict[str, str]:
        """Modules that are left to Megatron on purpose, and why."""
        return dict(self._left)

    def snapshot(self) -> dict[Site, Tally]:
        """A copy of all counts, in the order of the sites."""
        with self._lock:
            return {
                site: replace(tally, fallbacks=dict(tally.fallbacks), not_fused=dict(tally.not_fused))
                for site, tally in sorted(self._tallies.items())
            }


@dataclass(frozen=True)
class PatchLine:
    """One patch in a report."""

    target: str
    feature: str
    verdict: str
    reason: str
    applied: bool
    stale: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a session had done when the report was made, on this rank."""

    active: bool
    reason: str
    strict: bool
    versions: Mapping[str, str | None]
    features: Mapping[str, str]
    patches: tuple[PatchLine, ...]
    sites: Mapping[Site, Tally]
    kept: SavedMemory = SavedMemory()
    left: Mapping[str, str] = field(default_factory=dict)
    choices: tuple[ChoiceLine, ...] = ()
    checked: Mapping[str, float] = field(default_factory=dict)
    buffers: tuple[tuple[str, Mapping[str, int]], ...] = ()
    symmetric: tuple[SymmetricMemory, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        return {
            "active": self.active,
            "reason": self.reason,
            "strict": self.strict,
            "versions": dict(self.versions),
            "features": dict(self.features),
            "patches": [
                {
                    "target": line.target,
                    "feature": line.feature,
                    "verdict": line.verdict,
                    "reason": line.reason,
                    "applied": line.applied,
                    "stale": list(line.stale),
                }
                for line in self.patches
            ],
            "modules": [
                {
                    **site._asdict(),
                    "overlapped": tally.overlapped,
                    "bytes": tally.moved_bytes,
                    "fallbacks": dict(tally.fallbacks),
                    **({"not_fused": dict(tally.not_fused)} if tally.not_fused else {}),
                    **({"chosen_stock": tally.chosen_stock} if tally.chosen_stock else {}),
                }
                for site, tally in self.sites.items()
            ],
            "left_to_megatron": dict(self.left),
            "choices": [{**asdict(line), "gain": line.gain} for line in self.choices],
            "checked": dict(self.checked),
            "memory": self.kept.as_dict(),
            "buffers": [{"ranks": ranks, "bytes": dict(sizes)} for ranks, sizes in self.buffers],
            **({} if self.symmetric is None else {"symmetric_memory": [each._asdict() for each in self.symmetric]}),
            "totals": {
                "overlapped": sum(tally.overlapped for tally in self.sites.values()),
                "fallbacks": sum(sum(tally.fallbacks.values()) for tally in self.sites.values()),
                "bytes": sum(tally.moved_bytes for tally in self.sites.values()),
            },
        }

    def table(self) -> RenderableType:
        """The report for a rich console."""
        parts: list[RenderableType] = [self._headline()]
        if self.patches:
            parts.append(self._patch_table())
        if self.sites:
            parts.append(self._call_table())
        if self.choices:
            parts.append(choice_table(self.choices))
        if self.kept.calls:
            parts.append(self._memory_table())
        parts += [_buffer_line(ranks, sizes) for ranks, sizes in self.buffers if sizes]
        if self.checked:
            name, share = max(self.checked.items(), key=lambda item: item[1])
            parts.append(f"checked: {len(self.checked)} results, worst {name}: {share:.3g} of what is allowed")
        parts += self._symmetric_lines()
        parts += [f"left to Megatron: {module}: {reason}" for module, reason in self.left.items()]
        return Group(*parts)

    def render(self, width: int = 120) -> str:
        """The report as plain text, `width` characters wide."""
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get().rstrip()

    def _headline(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        state = "active" if self.active else "not active"
        features = ", ".join(f"{name}: {method}" for name, method in self.features.items())
        strict = ", strict" if self.strict else ""
        return f"megatron_overlap is {state}: {self.reason}\n{features}{strict} ({versions})"

    def _patch_table(self) -> Table:
        table = Table("replaced in Megatron", "verdict", "why", title="patches", title_justify="left")
        for line in self.patches:
            verdict = line.verdict if line.applied or line.verdict == "refused" else f"{line.verdict}, not applied"
            why = line.reason
            if line.stale:
                why += f"; by value, so not overlapped, in {', '.join(line.stale)}"
            table.add_row(line.target.rpartition(":")[2], verdict, why)
        return table

    def _call_table(self) -> Table:
        table = Table("module", "op", "direction", title="calls on this rank", title_justify="left")
        table.add_column("overlapped", justify="right")
        table.add_column("sent MiB", justify="right")
        table.add_column("Megatron's own path, because")
        for site, tally in self.sites.items():
            reasons = "; ".join(
                [f"{tally.chosen_stock} x chosen"] * (tally.chosen_stock > 0)
                + [f"{count} x {reason}" for reason, count in sorted(tally.fallbacks.items())]
                + [f"{count} x p2p, not fused: {reason}" for reason, count in sorted(tally.not_fused.items())]
            )
            table.add_row(
                f"{site.kind} {site.name}".strip(),
                site.op,
                site.direction,
                str(tally.overlapped),
                f"{tally.moved_bytes / _MIB:.1f}",
                reasons or "-",
            )
        return table

    def _symmetric_lines(self) -> list[str]:
        if self.symmetric is None:
            return []
        if not self.symmetric:
            return ["symmetric memory of fused kernels: none allocated"]
        lines = []
        for each in self.symmetric:
            lines.append(
                f"symmetric memory of fused kernels: {each.num_bytes} bytes in a group of {each.num_ranks} ranks, "
                f"twice its largest gathered activation ({each.bound_bytes} bytes) and flags"
            )
            lines += [f"  {count} GEMMs ran portable kernels: {reason}" for reason, count in each.portable.items()]
        return lines

    def _memory_table(self) -> Table:
        kept = self.kept
        title = f"inputs kept for weight gradients, recompute_gather: {kept.choice}"
        table = Table("module", "op", title=title, title_justify="left")
        table.add_column("MiB a call", justify="right")
        table.add_column(f"with {kept.otherwise}", justify="right")
        for site, num_bytes, otherwise in kept.calls:
            cells = (f"{num_bytes / _MIB:.2f}", f"{otherwise / _MIB:.2f}")
            table.add_row(f"{site.kind} {site.name}".strip(), site.op, *cells)
        peaks = (f"{kept.peak_bytes / _MIB:.2f}", f"{kept.otherwise_peak_bytes / _MIB:.2f}")
        table.add_row("all, most at one time", "", *peaks)
        return table


def _buffer_line(ranks: str, sizes: Mapping[str, int]) -> str:
    each = sorted(sizes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {num_bytes / _MIB:.1f}" for name, num_bytes in each)
    return f"buffers for {ranks}, kept for the run: {sum(sizes.values()) / _MIB:.1f} MiB ({parts})"


def choice_table(lines: Iterable[ChoiceLine]) -> Table:
    """Choices for a rich console."""
    table = Table("module", "op", title="choices of method auto", title_justify="left")
    table.add_column("rows", justify="right")
    table.add_column("passes")
    table.add_column("serves")
    for heading in ("ms", "own ms", "gain"):
        table.add_column(heading, justify="right")
    table.add_column("why not otherwise")
    for line in lines:
        times = ("-" if ms is None else f"{ms:.2f}" for ms in (line.ms, line.stock_ms))
        gain = "-" if line.gain is None else f"{line.gain:+.0%}"
        table.add_row(line.module, line.op, str(line.rows), line.passes, line.method, *times, gain, line.why)
    return table
