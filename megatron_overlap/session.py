"""Enables and disables the plugin in this process. A `Session` owns the patches, adapters and counters of one use."""

from __future__ import annotations

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_overlap.config import ConfigError, OverlapConfig
from megatron_overlap.config.merge import leaves
from megatron_overlap.counters import Counters
from megatron_overlap.patching import PatchError, PatchRefusedError, PatchWarning
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import NOT_APPLIED, Manifest, Verdict, load_manifests
from megatron_overlap.patching.planning import Finding, Plan
from megatron_overlap.patching.source import ImportedTree, megatron_release
from megatron_overlap.session_report import PatchLine, Report
from megatron_overlap.tracing import Trace
from megatron_overlap.version import __version__

if TYPE_CHECKING:
    from megatron_overlap.comm import Transports

OFF_SWITCH = "MEGATRON_OVERLAP"


class Adapter:
    """State that one feature keeps for a session."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def start(self) -> None:
        """All patches of `enable` are applied; only for adapters that their factories made."""

    def close(self) -> None:
        """Releases all resources; `Session.disable` calls it after the patches are reverted."""

    def drop(self) -> None:
        """Releases the resources of process groups that the job destroyed, without waiting for peers."""

    def step_ended(self) -> None:
        """A training step ended; `Session.step` still has its number."""


class Session(AbstractContextManager["Session"]):
    """One use of the plugin, from `enable` to `disable`; a context manager that disables at its end.

    Attributes:
        reason: why the session is active, or why it is not.
        switched_off: `MEGATRON_OVERLAP=0` is set: nothing is overlapped.
        trace: records the events of transports that are opened later; None records none.
        step: number of the training step that runs, from 1; 0 before the first. Megatron's training loop is followed;
            any other loop calls `next_step`.
        folder: of the files that describe a failure.
    """

    def __init__(self, config: OverlapConfig, manifests: Sequence[Manifest] = ()) -> None:
        self.config = config
        self.counters = Counters(config.strict)
        self.switched_off = False
        self.trace: Trace | None = None
        self.step = 0
        self.folder = Path()
        self._adapters: dict[type[Adapter], Adapter] = {}
        self._engine = Engine(manifests)
        self._plan = Plan(())  # of all patches that were applied or refused
        self.reason = "not enabled yet"
        self._closers: list[Callable[[], object]] = []

    def adapter[A: Adapter](self, kind: type[A], make: Callable[[Session], A] | None = None) -> A:
        """The adapter of class `kind`; the first call makes it, by `make` or by `kind`, and registers its `close`."""
        adapter = self.find(kind)
        if adapter is None:
            adapter = kind(self) if make is None else make(self)
            self._adapters[kind] = adapter
            self.add_close(adapter.close)
        return adapter

    def find[A: Adapter](self, kind: type[A]) -> A | None:
        """The adapter of class `kind`, if it was made."""
        adapter = self._adapters.get(kind)
        assert adapter is None or isinstance(adapter, kind)
        return adapter

    def drop_adapters(self) -> None:
        """Calls `drop` of every adapter: the job destroyed its process groups."""
        for adapter in list(self._adapters.values()):
            adapter.drop()

    def remove(self, kind: type[Adapter]) -> None:
        """Forgets an adapter, so that the next `adapter(kind)` makes another one."""
        self._adapters.pop(kind, None)

    @cached_property
    def transports(self) -> Transports:
        """Owner of the transports of this session; `disable` closes them."""
        # Imported on first use: the package imports torch, which a session without communication does not need.
        from megatron_overlap.comm import Transports

        return Transports()

    @property
    def active(self) -> bool:
        """Whether a function of an overlapped feature is replaced now."""
        return self._replaces(_FEATURES)

    def _replaces(self, features: Collection[str]) -> bool:
        applied = self._engine.applied
        return any(finding.manifest.target in applied for finding in self._plan.of(features).applicable)

    def add_close(self, close: Callable[[], object]) -> None:
        """Registers a clean-up for `disable`; the last one registered runs first."""
        self._closers.append(close)

    def apply_patches(self, features: Collection[str], *, required: bool = False) -> None:
        """Applies the patches of further features. A feature of an earlier call is skipped.

        Raises PatchRefusedError if a patch is refused, and the patches are required or the config is strict; nothing is
        changed.
        """
        known = {finding.manifest.feature for finding in self._plan.findings}
        self._apply(self._engine.plan(set(features) - known), required=required)
        if self.active:
            self.reason = self._explain()

    def _apply(self, plan: Plan, *, required: bool = False) -> None:
        refused = [_sentence(finding) for finding in plan.refused]
        if refused and (required or self.config.strict):
            raise PatchRefusedError("; ".join(refused) + ("" if required else "; or set overlap.strict to false"))
        self._engine.apply(plan, self)
        self._plan = Plan(self._plan.findings + plan.findings)

    def next_step(self, number: int | None = None) -> None:
        """Begins the next training step, or step `number`.

        From the first call on, parameter gathers that the optimizer step starts may run until the next forward.
        """
        for adapter in self._adapters.values():
            adapter.step_ended()
        if "transports" in self.__dict__:
            self.transports.free_replaced()
        self.step = self.step + 1 if number is None else number

    def consistency_facts(self) -> dict[str, str]:
        """Facts that must be equal on all ranks: config, versions and patches."""
        report = self.report()
        facts = {key: str(value) for key, value in leaves(self.config.model_dump(mode="json"), "overlap")}
        facts |= {f"version of {name}": str(version) for name, version in report.versions.items()}
        for line in report.patches:
            facts[f"patch {line.target}"] = line.verdict if line.applied else f"{line.verdict}, not applied"
        return facts

    def report(self) -> Report:
        """What is replaced, overlapped and not overlapped so far, on this rank."""
        counters = self.counters
        sites = counters.snapshot()
        return Report(
            active=self.active,
            reason=self.reason,
            strict=self.config.strict,
            versions=installed_versions(),
            features={name: _method(self.config, name) for name in _FEATURES},
            patches=tuple(map(_patch_line, self._plan.findings)),
            sites=sites,
            not_overlapped=dict(counters.excluded),
            autotuning=tuple(line for lines in counters.autotune_lines for line in lines()),
            numerics_check=dict(counters.numerics_check),
            unchecked=self._unchecked() if sites else "",
            buffers=tuple(self.transports.buffers()) if "transports" in self.__dict__ else (),
            transports=dict(counters.transports),
            symmetric_memory=None if counters.symmetric_memory is None else tuple(counters.symmetric_memory()),
        )

    def _unchecked(self) -> str:
        """Why `overlap.check` has compared nothing; see `Report`."""
        every = self.config.check.every
        if not every or self.counters.numerics_check:
            return ""
        if self.step == 0:
            return "the training loop does not call next_step"
        return f"step {every} is the first" if self.step < every else "no overlapped operation ran in such a step"

    def disable(self) -> None:
        """Reverts all patches, then runs the clean-ups; the second call does nothing.

        Raises:
            RevertRefusedError: another package replaced one of our replacements; nothing is changed then.
            ExceptionGroup: clean-ups failed; all others ran, and all patches are reverted.
        """
        was_active = self.active
        self._engine.revert()
        if was_active:
            self.reason = "disabled"
        self.clean_up()

    def clean_up(self) -> None:
        """Runs the clean-ups, and leaves the patches; raises as `disable`."""
        errors: list[Exception] = []
        if "transports" in self.__dict__:
            # Runs last: other clean-ups may wait for messages.
            self._closers.insert(0, self.transports.close)
        while self._closers:
            try:
                self._closers.pop()()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("clean-ups failed in Session.disable", errors)

    def suspended(self) -> AbstractContextManager[None]:
        """Inside the context the stock path runs, to compare it with the overlapped one in the same process.

        The session keeps its transports and measurements. Enter and leave it on all ranks, never between the forward
        and the backward pass of a step.
        """
        return self._engine.suspended()

    def __exit__(self, *_: object) -> None:
        self.disable()

    def _start(self) -> None:
        features = {feature for feature in _FEATURES if _method(self.config, feature) not in _NOTHING_REPLACED}
        try:
            # One search of the process for both.
            plan = self._engine.plan({*features, *_ALWAYS} if features else ())
            self._apply(plan.of(features))
            if self.active or self.config.varlen.method != "none":
                self._apply(plan.of(_ALWAYS))
            self.reason = self._explain()
            self._warn()
            for adapter in list(self._adapters.values()):
                adapter.start()
        except BaseException:
            self._engine.revert()
            self.clean_up()
            raise

    def _warn(self) -> None:
        for finding in self._plan.findings:
            if finding.verdict not in (Verdict.APPLIES, Verdict.ABSENT):
                warnings.warn(_sentence(finding), PatchWarning, stacklevel=4)
            if finding.stale:
                text = f"{finding.manifest.target}: {', '.join(finding.stale)} hold it by value: calls through them are"
                text += " not overlapped; enable the plugin before they are imported"
                warnings.warn(text, PatchWarning, stacklevel=4)

    def _explain(self) -> str:
        plan = self._plan.of(_FEATURES)
        if plan.applicable:
            num_replaced, num_overlapped = len(self._plan.applicable), len(plan.applicable)
            overlapped = f", {num_overlapped} of them to overlap" if num_overlapped < num_replaced else ""
            refused = f", {len(plan.refused)} refused" if plan.refused else ""
            return f"{num_replaced} of Megatron's functions are replaced{overlapped}{refused}"
        if plan.refused:
            return f"the stock path runs everywhere: {'; '.join(map(_sentence, plan.refused))}"
        if self.config.varlen.method != "none":
            return "no function is replaced: the provided scripts put the attention into the layer spec"
        return "the config asks for no feature that replaces a function of Megatron"


_current: Session | None = None
"""The session of this process. Megatron's classes exist once in a process, so at most one session is active."""


def enable(
    config: OverlapConfig | str | Path | None = None,
    *,
    strict: bool | None = None,
    manifests: Sequence[Manifest] | None = None,
) -> Session:
    """Applies the patches of every feature that the config asks for: all patches of a feature, or none.

    Args:
        config: the config, or the YAML file that holds it; None is the default config.
        strict: overrides the config's `strict`.
        manifests: patches to use instead of the package's own.

    Returns:
        The session. It is not active where `MEGATRON_OVERLAP=0` is set, where the config asks for no feature, or
        where patches are refused and `strict` is false. `Session.reason` has the cause; each refusal is a warning.

    Raises:
        ConfigError: the file is wrong.
        PatchError: a session is active already; with `strict`, also that a patch is refused.
        ConfigMismatchError: Megatron's process groups exist, and the ranks run different configs, versions or patches.
            Where the groups do not exist, the ranks are compared when Megatron makes them.
    """
    global _current
    if _current is not None and _current._replaces((*_FEATURES, *_ALWAYS)):
        raise PatchError("megatron_overlap is enabled already; call disable() on that session first")
    if not isinstance(config, OverlapConfig):
        config = OverlapConfig() if config is None else OverlapConfig.from_yaml(config)
    if strict is not None:
        config = config.model_copy(update={"strict": strict})
    off = is_switched_off()
    session = Session(config, load_manifests() if manifests is None else manifests)
    if off:
        session.switched_off, session.reason = True, f"switched off by {OFF_SWITCH}=0"
    else:
        session._start()
    _current = session
    return session


def is_switched_off() -> bool:
    """Whether the environment has `MEGATRON_OVERLAP=0`. Raises ConfigError for another value than 0 or 1."""
    switch = os.environ.get(OFF_SWITCH, "")
    if switch not in ("", "0", "1"):
        raise ConfigError("environment", OFF_SWITCH, switch, "write 0 to switch the plugin off, or unset it")
    return switch == "0"


def disable() -> None:
    """Disables the session of this process, if there is one."""
    global _current
    if _current is not None:
        _current.disable()
        _current = None


def current() -> Session | None:
    """The session of this process, if there is one."""
    return _current


def report() -> Report:
    """The report of this process's session. Raises PatchError if `enable` was not called, or `disable` was."""
    if _current is None:
        raise PatchError("megatron_overlap is not enabled; call enable(config) first")
    return _current.report()


def installed_versions() -> dict[str, str | None]:
    """Releases that a run depends on; None where one is not installed."""
    return {
        "megatron_overlap": __version__,
        "megatron-core": megatron_release(ImportedTree()) or installed_release("megatron-core"),
        "torch": installed_release("torch"),
    }


_FEATURES = ("tensor", "attention", "split", "data", "ulysses", "expert", "varlen")
_ALWAYS = ("consistency", "bucket_order")
"""Features that any other needs."""
_NOTHING_REPLACED = ("none", "stock", "row")


def _method(config: OverlapConfig, feature: str) -> str:
    if feature in ("attention", "split"):
        # These features belong to tensor parallelism: they are keys of its section.
        method, value = config.tensor.method, str(getattr(config.tensor, feature))
        # Only the autotuner can select batch overlap for `split: auto`.
        needs_autotuner = feature == "split" and value == "auto"
        return "none" if method == "none" or (needs_autotuner and method != "auto") else value
    return str(getattr(config, feature).method)


def _patch_line(finding: Finding) -> PatchLine:
    target, feature, applied = finding.manifest.target, finding.manifest.feature, finding.verdict not in NOT_APPLIED
    return PatchLine(target, feature, str(finding.verdict), finding.reason, applied, finding.stale)


def _sentence(finding: Finding) -> str:
    return f"{finding.manifest.target}: {finding.verdict}: {finding.reason}"


@cache
def installed_release(distribution: str) -> str | None:
    """The installed release of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
