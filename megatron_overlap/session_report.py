"""The report of a session on one rank: as JSON and as plain text."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Column, Table

from megatron_overlap.counters import AutotuneLine, Site, SymmetricMemory, Tally

_MIB = 1024 * 1024
_right = partial(Column, justify="right")
_table = partial(Table, title_justify="left")


@dataclass(frozen=True)
class PatchLine:
    """One patch. `stale`: attributes outside Megatron that hold the original by value and are not overlapped."""

    target: str
    feature: str
    verdict: str
    reason: str
    applied: bool
    stale: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """What a session replaced, overlapped and did not overlap until the report was made, on this rank.

    Attributes:
        active, reason: whether a function of an overlapped feature is replaced, and why.
        versions: releases that the run depends on; None where one is not installed.
        features: method of each feature, as the config has it.
        not_overlapped: modules that no method overlaps, with the reason.
        autotuning: what `method: auto` selected.
        numerics_check: the largest share of the allowed error in check mode, by operation and tensor.
        unchecked: why `overlap.check` has compared nothing, after the first call; empty if it has, or is not set.
        buffers: bytes of communication buffers by use, for each set of ranks.
        symmetric_memory: memory of fused kernels by group; None unless the config asks for fused kernels.
        transports: what carries the messages of layers with sequence parallelism, by group; why, if not copy engines.
    """

    active: bool
    reason: str
    strict: bool
    versions: Mapping[str, str | None]
    features: Mapping[str, str]
    patches: tuple[PatchLine, ...]
    sites: Mapping[Site, Tally]
    not_overlapped: Mapping[str, str] = field(default_factory=dict)
    autotuning: tuple[AutotuneLine, ...] = ()
    numerics_check: Mapping[str, float] = field(default_factory=dict)
    unchecked: str = ""
    buffers: tuple[tuple[str, Mapping[str, int]], ...] = ()
    symmetric_memory: tuple[SymmetricMemory, ...] | None = None
    transports: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON can hold it."""
        symmetric, tallies = self.symmetric_memory, self.sites.values()
        optional = ("not_fused", "stock_selected", "not_communicating")
        return {
            **{name: getattr(self, name) for name in ("active", "reason", "strict", "versions", "features")},
            "patches": [asdict(line) for line in self.patches],
            "modules": [
                {
                    **site._asdict(),
                    "overlapped": tally.overlapped,
                    "bytes": tally.moved_bytes,
                    "fallbacks": dict(tally.fallbacks),
                    **{name: value for name in optional if (value := getattr(tally, name))},
                }
                for site, tally in self.sites.items()
            ],
            "not_overlapped": dict(self.not_overlapped),
            "autotuning": [{**asdict(line), "gain": line.gain} for line in self.autotuning],
            "numerics_check": dict(self.numerics_check),
            **({"unchecked": self.unchecked} if self.unchecked else {}),
            "buffers": [{"ranks": ranks, "bytes": dict(sizes)} for ranks, sizes in self.buffers],
            "transports": dict(self.transports),
            **({} if symmetric is None else {"symmetric_memory": [each._asdict() for each in symmetric]}),
            "totals": {
                "overlapped": sum(tally.overlapped for tally in tallies),
                "fallbacks": sum(sum(tally.fallbacks.values()) for tally in tallies),
                "bytes": sum(tally.moved_bytes for tally in tallies),
            },
        }

    def render(self, width: int = 120, *, at_start: bool = False) -> str:
        """The report as plain text. Tables have at most `width` characters; other lines are not wrapped.

        `at_start`: no call can have been made, so features without a call are not named.
        """
        parts: list[RenderableType] = [self._headline()]
        if self.patches:
            parts.append(self._patch_table())
        if self.sites:
            parts.append(self._call_table())
        if self.autotuning:
            parts.append(autotune_table(self.autotuning))
        parts += [_buffer_line(ranks, sizes) for ranks, sizes in self.buffers if sizes]
        if self.numerics_check:
            name, share = max(self.numerics_check.items(), key=lambda item: item[1])
            results = f"{len(self.numerics_check)} results"
            parts.append(f"numerics check: {results}, worst {name}: {share:.3g} of the allowed error")
        if self.unchecked:
            parts.append(f"numerics check: nothing compared: {self.unchecked}")
        parts += [f"messages of {ranks}: {text}" for ranks, text in self.transports.items()]
        parts += self._symmetric_lines()
        parts += [f"not overlapped: {module}: {reason}" for module, reason in self.not_overlapped.items()]
        if self.active and not at_start:
            parts += [f"not overlapped: overlap.{feature}: no call on this rank" for feature in self._unused()]
        console = Console(width=width, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(Group(*parts), soft_wrap=True)
        return capture.get().rstrip()

    def _unused(self) -> list[str]:
        """The features whose method the config names, and that no call used."""
        used = {site.feature for site in self.sites}
        named = "p2p", "fused", "balanced", "ring", "all_gather"
        return [name for name, method in self.features.items() if method in named and name not in used]

    def _headline(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items() if version)
        state = "active" if self.active else "not active"
        features = ", ".join(f"{name}: {method}" for name, method in self.features.items())
        strict = ", strict" if self.strict else ""
        return f"megatron_overlap is {state}: {self.reason}\n{features}{strict} ({versions})"

    def _patch_table(self) -> Table:
        table = _table("feature", Column("replaced", no_wrap=True), "verdict", "reason", title="patches")
        for line in sorted(self.patches, key=lambda line: line.feature):
            verdict = line.verdict if line.applied or line.verdict == "refused" else f"{line.verdict}, not applied"
            reason = line.reason
            if line.stale:
                reason += f"; not overlapped through {', '.join(line.stale)}, which hold the original by value"
            table.add_row(line.feature, line.target.rpartition(":")[2], verdict, reason)
        return table

    def _call_table(self) -> Table:
        table = _table("module", "op", "direction", _right("overlapped"), _right("sent MiB"), "stock path, reason")
        table.title = "calls on this rank"
        for site, tally in self.sites.items():
            reasons = "; ".join(
                [f"{tally.stock_selected} x selected or measured by autotuning"] * (tally.stock_selected > 0)
                + [f"{tally.not_communicating} x communicates nothing in this pass"] * (tally.not_communicating > 0)
                + [f"{count} x {reason}" for reason, count in sorted(tally.fallbacks.items())]
                + [f"{count} x p2p, not fused: {reason}" for reason, count in sorted(tally.not_fused.items())]
            )
            sent = f"{tally.moved_bytes / _MIB:.1f}"
            table.add_row(site.module, site.op, site.direction, str(tally.overlapped), sent, reasons or "-")
        return table

    def _symmetric_lines(self) -> Iterator[str]:
        if self.symmetric_memory == ():
            yield "symmetric memory of fused kernels: none allocated"
        for each in self.symmetric_memory or ():
            yield (
                f"symmetric memory of fused kernels: {each.num_bytes} bytes in a group of {each.num_ranks} ranks, "
                f"twice its largest gathered activation ({each.bound_bytes} bytes) and flags"
            )
            for reason, count in each.portable.items():
                yield f"  {count} GEMMs ran portable kernels: {reason}"


def _buffer_line(ranks: str, sizes: Mapping[str, int]) -> str:
    largest_first = sorted(sizes.items(), key=lambda item: -item[1])
    parts = ", ".join(f"{name} {num_bytes / _MIB:.1f}" for name, num_bytes in largest_first)
    return f"communication buffers of {ranks}: {sum(sizes.values()) / _MIB:.1f} MiB ({parts})"


def autotune_table(lines: Iterable[AutotuneLine]) -> Table:
    """What autotuning selected, for a rich console."""
    times = map(_right, ("ms", "stock ms", "gain"))
    table = _table("module", "op", _right("rows"), "passes", "method", *times, "reason", title="autotuning")
    for line in lines:
        ms, stock_ms = ("-" if value is None else f"{value:.2f}" for value in (line.ms, line.stock_ms))
        gain = "-" if line.gain is None else f"{line.gain:+.0%}"
        table.add_row(line.module, line.op, str(line.rows), line.passes, line.method, ms, stock_ms, gain, line.reason)
    return table
