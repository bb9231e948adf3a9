"""Looks at the running process: what stands at each target, who made it, and who else holds it."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_overlap.patching.bindings import Binding, bindings_of, find_loaded
from megatron_overlap.patching.compatibility import Judgement, Verdict, judge
from megatron_overlap.patching.manifest import Manifest
from megatron_overlap.patching.source import Definition, ImportedTree, Target, definitions

Factory = Callable[[Callable[..., Any], Any], Callable[..., Any]]


class _RefusedError(Exception):
    """Ends the planning of one patch; never leaves this file."""


@dataclass(frozen=True)
class Finding:
    """What planning found out about one patch.

    `stale` names those outside the target's own package who hold it by value: they are not rebound, and their
    calls go on running Megatron's own path.
    """

    manifest: Manifest
    verdict: Verdict
    reason: str
    stale: tuple[str, ...] = ()
    site: Binding | None = field(default=None, repr=False)
    original: Any = field(default=None, repr=False)
    own: bool = True
    factory: Factory | None = field(default=None, repr=False)
    rebind: tuple[Binding, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The findings of one look at the running process."""

    findings: tuple[Finding, ...]

    @property
    def refused(self) -> list[Finding]:
        """The patches that must not be applied."""
        return [finding for finding in self.findings if finding.verdict is Verdict.REFUSED]

    @property
    def applicable(self) -> list[Finding]:
        """The patches that may be applied."""
        return [finding for finding in self.findings if finding.verdict is not Verdict.REFUSED]


@dataclass(frozen=True)
class _Seen:
    site: Binding
    original: Any
    own: bool
    judgement: Judgement
    factory: Factory


def look(manifests: Iterable[Manifest]) -> list[Finding]:
    """Plans patches: imports their modules, looks at what is there, and changes nothing."""
    seen = [(manifest, _attempt(_examine, manifest)) for manifest in manifests]
    # One search for all of them, after the last import of any: it goes through everything in sys.modules.
    fits = [each.original for _, each in seen if isinstance(each, _Seen)]
    holders = iter(bindings_of(*fits))
    findings = []
    for manifest, each in seen:
        found = _attempt(_finish, manifest, each, next(holders)) if isinstance(each, _Seen) else each
        findings.append(found if isinstance(found, Finding) else Finding(manifest, Verdict.REFUSED, found))
    return findings


def _attempt[**P, T](step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | str:
    """What a step of the planning returns, or why the patch is refused."""
    try:
        return step(*args, **kwargs)
    except _RefusedError as refusal:
        return str(refusal)


def _examine(manifest: Manifest) -> _Seen:
    site, original, own = _resolve(Target.parse(manifest.target))
    for name in manifest.relies_on:
        # Only what is imported can be judged; what cannot be imported is then reported as missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(Target.parse(name).module)
    judgement = judge(manifest, _shipped(site, original), ImportedTree())
    if judgement.verdict is Verdict.REFUSED:
        raise _RefusedError(judgement.reason)
    return _Seen(site, original, own, judgement, _import_factory(Target.parse(manifest.replacement)))


def _finish(manifest: Manifest, seen: _Seen, holders: Iterable[Binding]) -> Finding:
    rebind, stale = _by_value(manifest, seen.site, seen.original, holders)
    return Finding(
        manifest,
        seen.judgement.verdict,
        seen.judgement.reason,
        stale=tuple(map(str, stale)),
        site=seen.site,
        original=seen.original,
        own=seen.own,
        factory=seen.factory,
        rebind=tuple(rebind),
    )


def _resolve(target: Target) -> tuple[Binding, Any, bool]:
    try:
        importlib.import_module(target.module)
    except ImportError as error:
        raise _RefusedError(f"{target.module} cannot be imported: {error}") from error
    site = find_loaded(target)
    if site is None:
        raise _RefusedError(f"{target.module} has no {target.qualname}")
    if not isinstance(site.holder, ModuleType):
        shipped = (target.module, target.qualname.rpartition(".")[0])
        if (site.module, site.holder.__qualname__) != shipped:
            raise _RefusedError(
                f"{':'.join(shipped)} is now {site.module}.{site.holder.__qualname__}: a class was replaced"
                " by somebody else; undo that first, or enable this before"
            )
    own = site.read()
    if own is not None:
        return site, own, True
    for base in getattr(site.holder, "__mro__", ())[1:]:
        inherited = Binding(base, site.name).read()
        if inherited is not None:
            return site, inherited, False
    raise _RefusedError(f"{target.module} has no {target.qualname}")


def plain_function(raw: Any) -> Any:
    """The function inside a static or class method; anything else as it is."""
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _shipped(site: Binding, raw: Any) -> Definition:
    """The statement in the owner's own source that made `raw`; refuses whatever somebody else put there."""
    owner = site.holder
    if not isinstance(owner, ModuleType):
        owner = next(base for base in owner.__mro__ if Binding(base, site.name).read() is raw)
    place = Binding(owner, site.name)
    qualname = site.name if isinstance(owner, ModuleType) else f"{owner.__qualname__}.{site.name}"
    tree = ImportedTree()
    shipped = definitions(tree, Target(place.module, qualname))
    if not shipped:
        known = tree.read(place.module) is not None
        raise _RefusedError(
            f"{place} is {who(raw)}: replaced by somebody else, or moved; undo that first"
            if known
            else f"the source of {place.module} is not readable, so nobody can say whether it was read"
        )
    function, num_wrappers = plain_function(raw), 0
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function, num_wrappers = inner, num_wrappers + 1
    for definition in shipped:
        if num_wrappers <= definition.num_decorators and _made_by(function, definition):
            return definition
    raise _RefusedError(f"{place} was already replaced by {who(raw)}; undo that first, or enable this before")


def _made_by(function: Any, definition: Definition) -> bool:
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and os.path.realpath(code.co_filename) == os.path.realpath(definition.file)
        and code.co_firstlineno == definition.line
    )


def _by_value(
    manifest: Manifest, site: Binding, original: Any, holders: Iterable[Binding]
) -> tuple[list[Binding], list[Binding]]:
    """Splits those who hold `original` by value into listed and harmless ones; refuses the rest."""
    function = plain_function(original)
    listed: list[Binding] = []
    for name in manifest.also_bound:
        binding = find_loaded(Target.parse(name))
        if binding is None or (held := binding.read()) is None:
            continue
        if held is not function and held is not original:
            raise _RefusedError(f"{binding} should hold the target and holds {who(held)}; undo that first")
        listed.append(binding)
    package = site.module.partition(".")[0]
    stale = []
    for binding in holders:
        if binding in listed or binding == site or _is_source(binding, site):
            continue
        if binding.module.partition(".")[0] == package:
            raise _RefusedError(
                f"{binding} holds it by value and is not in also_bound: this release is laid out as none that was read"
            )
        stale.append(binding)
    return listed, stale


def _is_source(binding: Binding, site: Binding) -> bool:
    # An inherited attribute is held by the base class it comes from.
    return binding.holder in getattr(site.holder, "__mro__", ()) and binding.name == site.name


def _import_factory(target: Target) -> Factory:
    try:
        importlib.import_module(target.module)
    except ImportError as error:
        raise _RefusedError(f"the replacement {target} cannot be imported: {error}") from error
    binding = find_loaded(target)
    factory = None if binding is None else binding.read()
    if not callable(factory):
        raise _RefusedError(f"the replacement {target} does not exist")
    made: Factory = factory
    return made


def who(thing: Any) -> str:
    """Names the maker of an object: module, name, file and line."""
    function = plain_function(thing)
    if thing is None:
        return "nothing"
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    module = getattr(function, "__module__", None) or type(function).__module__
    # A replacement made with functools.wraps carries the original's names; its globals tell whose it is.
    module = getattr(function, "__globals__", {}).get("__name__", module)
    given = getattr(function, "__qualname__", type(function).__qualname__)
    name = given if code is None else code.co_qualname
    return f"{module}.{name}{where}"
