"""Switches the plugin on and off in this process, and keeps what belongs to one use of it."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from megatron_overlap.config import ConfigError, OverlapConfig
from megatron_overlap.counters import Counters
from megatron_overlap.patching.compatibility import Verdict
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.errors import PatchError, PatchRefusedError, PatchWarning
from megatron_overlap.patching.manifest import Manifest, load_manifests
from megatron_overlap.patching.planning import Finding, Plan
from megatron_overlap.patching.source import ImportedTree, megatron_release
from megatron_overlap.session_report import PatchLine, Report
from megatron_overlap.tracing.events import Trace
from megatron_overlap.version import __version__

if TYPE_CHECKING:
    from megatron_overlap.comm import Transports

OFF_SWITCH = "MEGATRON_OVERLAP"


class Adapter:
    """State that one feature keeps for a session; made and registered by `Session.adapter`.

    Args:
        session: the session.
    """

    def __init__(self, session: Session) -> None:
        self.session = session

    def close(self) -> None:
        """Releases all resources; `Session.disable` calls it after the patches are reverted."""

    def drop(self) -> None:
        """Releases the resources of process groups that the job destroyed, without waiting for peers."""

    def step_ended(self) -> None:
        """A training step ended; `Session.step` still has its number."""

    def session_changed(self) -> None:
        """`Session.step` or `Session.folder` changed."""


class Session:
    """One use of the plugin, from `enable` to `disable`; a context manager that disables at its end.

    Attributes:
        config: the overlap config.
        counters: the counts of the adapters.
        switched_off: `MEGATRON_OVERLAP=0` is set: nothing is overlapped.
        trace: records the events of transports that are opened later; None records none.
        step: number of the training step that runs, from 1; 0 before the first. Megatron's training loop is followed;
            any other loop calls `next_step`.
        facts: further facts that must be equal on all ranks, besides config, versions and patches.
    """

    def __init__(self, config: OverlapConfig, manifests: Sequence[Manifest] = ()) -> None:
        self.config = config
        self.counters = Counters(config.strict)
        self.switched_off = False
        self.trace: Trace | None = None
        self.step = 0
        self.facts: dict[str, str] = {}
        self._folder = Path()
        self._adapters: dict[type[Adapter], Adapter] = {}
        self._engine = Engine(manifests)
        self._plan = Plan(())
        self._applied: tuple[str, ...] = ()
        self._reason = "not enabled yet"
        self._closers: list[Callable[[], object]] = []

    def adapter[A: Adapter](self, kind: type[A], make: Callable[[Session], A] | None = None) -> A:
        """The adapter of class `kind`; the first call makes it and registers its `close`.

        Args:
            kind: the adapter's class.
            make: makes the adapter; default: the class itself.
        """
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
    def folder(self) -> Path:
        """Folder of the files that describe a failure."""
        return self._folder

    @folder.setter
    def folder(self, folder: Path) -> None:
        self._folder = folder
        self._notify()

    @property
    def active(self) -> bool:
        """Whether anything in Megatron is replaced by this session now."""
        return bool(self._engine.applied)

    @property
    def reason(self) -> str:
        """Why the session is active, or why it is not."""
        return self._reason

    def add_close(self, close: Callable[[], object]) -> None:
        """Registers a clean-up for `disable`; the last one registered runs first."""
        self._closers.append(close)

    def next_step(self, number: int | None = None) -> None:
        """Begins the next training step, or step `number`."""
        for adapter in self._adapters.values():
            adapter.step_ended()
        self.step = self.step + 1 if number is None else number
        self._notify()

    def consistency_facts(self) -> dict[str, str]:
        """Facts that must be equal on all ranks: config, versions, patches, and `facts`."""
        report = self.report()
        facts = {f"overlap.{key}": value for key, value in _flat(self.config.model_dump(mode="json"))}
        facts |= {f"version of {name}": str(version) for name, version in report.versions.items()}
        facts |= {
            f"patch {line.target}": f"{line.verdict}{'' if line.applied else ', not applied'}"
            for line in report.patches
        }
        return facts | self.facts

    def report(self) -> Report:
        """What is replaced, overlapped and not overlapped so far, on this rank."""
        counters = self.counters
        return Report(
            active=self.active,
            reason=self._reason,
            strict=self.config.strict,
            versions=installed_versions(),
            features={name: _method(self.config, name) for name in _FEATURES},
            patches=tuple(self._line(finding) for finding in self._plan.findings),
            sites=counters.snapshot(),
            saved=counters.saved_activations.snapshot(),
            not_overlapped=counters.excluded,
            autotuning=counters.autotune_lines(),
            numerics_check=dict(counters.numerics_check),
            buffers=self._buffers(),
            symmetric_memory=None if counters.symmetric_memory is None else tuple(counters.symmetric_memory()),
        )

    def disable(self) -> None:
        """Puts Megatron back as it was found, then closes what was opened; does nothing the second time.

        Raises:
            RevertRefusedError: somebody replaced what we replaced; nothing is undone then, and the session goes on.
            ExceptionGroup: clean-ups failed; all others ran, and Megatron is as it was found.
        """
        was_active = self.active
        self._engine.revert()
        if was_active:
            self._reason = "disabled"
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()

    def _start(self) -> None:
        wanted = {feature for feature in _FEATURES if _method(self.config, feature) not in _NOTHING_REPLACED}
        self._plan = self._engine.plan(wanted)
        refused = [_sentence(finding) for finding in self._plan.refused]
        if refused and self.config.strict:
            raise PatchRefusedError("; ".join(refused) + "; or set overlap.strict to false")
        try:
            self._engine.apply(self._plan, self)
        except BaseException:
            self._close()
            raise
        self._applied = tuple(self._engine.applied)
        self._reason = self._why(refused)
        for finding in self._plan.findings:
            if finding.verdict is not Verdict.APPLIES:
                warnings.warn(_sentence(finding), PatchWarning, stacklevel=3)
            if finding.stale:
                held = ", ".join(finding.stale)
                warnings.warn(
                    f"{finding.manifest.target}: {held} hold it by value: calls through them are not overlapped;"
                    " enable the plugin before they are imported",
                    PatchWarning,
                    stacklevel=3,
                )

    def _why(self, refused: Sequence[str]) -> str:
        if self._applied:
            held_back = f", {len(refused)} refused" if refused else ""
            return f"{len(self._applied)} of Megatron's functions are replaced{held_back}"
        if refused:
            return f"Megatron's own path runs everywhere: {'; '.join(refused)}"
        if self.config.varlen.method != "none":
            return "nothing is replaced in Megatron: the provided scripts put the attention into the layer spec"
        return "the config asks for nothing that is replaced in Megatron"

    def _stay_off(self, reason: str) -> None:
        self.switched_off = True
        self._reason = reason

    def _line(self, finding: Finding) -> PatchLine:
        return PatchLine(
            target=finding.manifest.target,
            feature=finding.manifest.feature,
            verdict=str(finding.verdict),
            reason=finding.reason,
            applied=finding.manifest.target in self._applied,
            stale=finding.stale,
        )

    def _notify(self) -> None:
        for adapter in self._adapters.values():
            adapter.session_changed()

    def _buffers(self) -> tuple[tuple[str, dict[str, int]], ...]:
        """Ranks and buffer sizes of every open transport."""
        return tuple(self.transports.buffers()) if "transports" in self.__dict__ else ()

    def _close(self) -> None:
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
            raise ExceptionGroup("clean-ups failed while megatron_overlap was being disabled", errors)


class _Process:
    """The session of this process. Megatron's classes exist once in a process, so at most one can be on."""

    def __init__(self) -> None:
        self.current: Session | None = None


_PROCESS = _Process()


def enable(
    config: OverlapConfig | str | Path | None = None,
    *,
    strict: bool | None = None,
    manifests: Sequence[Manifest] | None = None,
) -> Session:
    """Replaces what the config asks for in Megatron, all of a feature or nothing of it.

    Args:
        config: the config, or the YAML file that holds it; None is the default one.
        strict: overrides the config's `strict`.
        manifests: patches to use instead of the package's own.

    Returns:
        The session. It is not active where `MEGATRON_OVERLAP=0` is set, where the config asks for nothing, or
        where patches are refused and `strict` is false; `Session.reason` says which, and a warning each refusal.

    Raises:
        ConfigError: the file is wrong.
        PatchError: the plugin is on already; with `strict`, also that a patch is refused.
        ConfigMismatchError: Megatron's groups are there, and the ranks run different configs, versions or patches.
        Where
            they are not, this is looked at when Megatron makes them.
    """
    current = _PROCESS.current
    if current is not None and current.active:
        raise PatchError("megatron_overlap is enabled already; call disable() on that session first")
    config = _read(config)
    if strict is not None:
        config = config.model_copy(update={"strict": strict})
    if _switched_off():
        session = Session(config)
        session._stay_off(f"switched off by {OFF_SWITCH}=0")
    else:
        session = Session(config, load_manifests() if manifests is None else manifests)
        session._start()
    _PROCESS.current = session
    if session.active or (not session.switched_off and session.config.varlen.method != "none"):
        # Here, and not above: it imports torch and Megatron, which are there when something of theirs is used.
        importlib.import_module("megatron_overlap.adapters.diagnostics.consistency").install(session)
    return session


def disable() -> None:
    """Disables the session of this process, if there is one."""
    if _PROCESS.current is not None:
        _PROCESS.current.disable()
        _PROCESS.current = None


def current() -> Session | None:
    """The session of this process, if there is one."""
    return _PROCESS.current


def report() -> Report:
    """The report of this process's session.

    Raises:
        PatchError: the plugin was never enabled, or `disable()` was called.
    """
    if _PROCESS.current is None:
        raise PatchError("megatron_overlap is not enabled; call enable(config) first")
    return _PROCESS.current.report()


def installed_versions() -> dict[str, str | None]:
    """Releases that a run depends on; None where one is not installed."""
    return {
        "megatron_overlap": __version__,
        "megatron-core": megatron_release(ImportedTree()) or _installed("megatron-core"),
        "torch": _installed("torch"),
    }


_FEATURES = ("tensor", "attention", "joint_mlp", "split", "data", "ulysses", "varlen")
_NOTHING_REPLACED = ("none", "stock", "row")


def _read(config: OverlapConfig | str | Path | None) -> OverlapConfig:
    if config is None:
        return OverlapConfig()
    return config if isinstance(config, OverlapConfig) else OverlapConfig.from_yaml(config)


def _method(config: OverlapConfig, feature: str) -> str:
    if feature in ("attention", "joint_mlp", "split"):
        # Their layers are those of tensor parallelism, so they have a key there and not a section.
        return "none" if config.tensor.method == "none" else str(getattr(config.tensor, feature))
    return str(getattr(config, feature).method)


def _flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)


def _switched_off() -> bool:
    value = os.environ.get(OFF_SWITCH, "")
    if value not in ("", "0", "1"):
        raise ConfigError("environment", OFF_SWITCH, value, "write 0 to switch the plugin off, or unset it")
    return value == "0"


def _sentence(finding: Finding) -> str:
    return f"{finding.manifest.target}: {finding.verdict}: {finding.reason}"


def _installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
