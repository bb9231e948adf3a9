"""Examines the running process: the object at each target, who made it, and which attributes hold it by value."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_overlap.patching.bindings import Binding, bindings_of, find_loaded
from megatron_overlap.patching.compatibility import NOT_COMPARED, Judgement, Verdict, judge
from megatron_overlap.patching.manifest import Manifest
from megatron_overlap.patching.source import Definition, ImportedTree, Target, definitions


class _RefusedError(Exception):
    """Ends the planning of one patch; caught in this module."""


@dataclass(frozen=True)
class Finding:
    """The result of planning one patch.

    Attributes:
        stale: attributes outside the target's package that hold the original by value. They are not replaced, and calls
            through them run the stock path.
        site: the target's attribute.
        original: its raw value.
        own: whether the holder has the attribute itself, and not by inheritance.
        made_by: the factory, or the substitute.
        rebind: attributes that are replaced with the target.
    """

    manifest: Manifest
    verdict: Verdict
    reason: str
    stale: tuple[str, ...] = ()
    site: Binding | None = field(default=None, repr=False)
    original: Any = field(default=None, repr=False)
    own: bool = True
    made_by: Any = field(default=None, repr=False)
    rebind: tuple[Binding, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The findings of one examination of the process."""

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
class _Examined:
    site: Binding
    original: Any
    own: bool
    judgement: Judgement
    made_by: Any


def plan_patches(manifests: Iterable[Manifest]) -> list[Finding]:
    """Imports the modules of all targets and replacements, examines the targets, and changes nothing."""
    examined = [(manifest, _attempt(_examine, manifest)) for manifest in manifests]
    # One search for all patches, after the last import of any: it reads every attribute in sys.modules.
    checked = [
        each.original for manifest, each in examined if isinstance(each, _Examined) and manifest.unchecked is None
    ]
    holders = iter(bindings_of(*checked))
    findings = []
    for manifest, each in examined:
        found: Finding | str
        if isinstance(each, str):
            found = each
        else:
            found = _attempt(_finish, manifest, each, next(holders) if manifest.unchecked is None else [])
        findings.append(found if isinstance(found, Finding) else Finding(manifest, Verdict.REFUSED, found))
    return findings


def _attempt[**P, T](step: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | str:
    """The result of a step of planning, or the reason why the patch is refused."""
    try:
        return step(*args, **kwargs)
    except _RefusedError as refusal:
        return str(refusal)


def _examine(manifest: Manifest) -> _Examined:
    site, original, own = _resolve(Target.parse(manifest.target))
    if manifest.unchecked is not None:
        return _Examined(site, original, own, NOT_COMPARED, _import_replacement(manifest))
    for name in manifest.relies_on:
        # The imported source is judged; a module that cannot be imported is then reported as missing.
        with contextlib.suppress(ImportError):
            importlib.import_module(Target.parse(name).module)
    judgement = judge(manifest, _definition_of(site, original), ImportedTree())
    if judgement.verdict is Verdict.REFUSED:
        raise _RefusedError(judgement.reason)
    return _Examined(site, original, own, judgement, _import_replacement(manifest))


def _finish(manifest: Manifest, examined: _Examined, holders: Iterable[Binding]) -> Finding:
    rebind, stale = _by_value(manifest, examined.site, examined.original, holders)
    return Finding(
        manifest,
        examined.judgement.verdict,
        examined.judgement.reason,
        stale=tuple(map(str, stale)),
        site=examined.site,
        original=examined.original,
        own=examined.own,
        made_by=examined.made_by,
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
        expected = (target.module, target.qualname.rpartition(".")[0])
        if (site.module, site.holder.__qualname__) != expected:
            raise _RefusedError(
                f"{':'.join(expected)} is now {site.module}.{site.holder.__qualname__}: another package replaced the"
                " class; undo that first, or enable this plugin before"
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
    """The function inside a static or class method; any other object as it is."""
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _definition_of(site: Binding, raw: Any) -> Definition:
    """The statement in the owner's source that made `raw`; refuses an object that another package put there."""
    owner = site.holder
    if not isinstance(owner, ModuleType):
        owner = next(base for base in owner.__mro__ if Binding(base, site.name).read() is raw)
    place = Binding(owner, site.name)
    qualname = site.name if isinstance(owner, ModuleType) else f"{owner.__qualname__}.{site.name}"
    tree = ImportedTree()
    found = definitions(tree, Target(place.module, qualname))
    if not found:
        known = tree.read(place.module) is not None
        raise _RefusedError(
            f"{place} is {describe(raw)}: another package replaced it, or it was moved; undo that first"
            if known
            else f"the source of {place.module} is not readable, so it cannot be compared with a reviewed release"
        )
    function, num_wrappers = plain_function(raw), 0
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function, num_wrappers = inner, num_wrappers + 1
    for definition in found:
        if num_wrappers <= definition.num_decorators and _made_by(function, definition):
            return definition
    raise _RefusedError(
        f"{place} was already replaced by {describe(raw)}; undo that first, or enable this plugin before"
    )


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
    """Splits the attributes that hold `original` by value into listed and foreign ones; refuses unlisted ones."""
    function = plain_function(original)
    listed: list[Binding] = []
    for name in manifest.also_bound:
        binding = find_loaded(Target.parse(name))
        if binding is None or (held := binding.read()) is None:
            continue
        if held is not function and held is not original:
            raise _RefusedError(f"{binding} must hold the target and holds {describe(held)}; undo that first")
        listed.append(binding)
    package = site.module.partition(".")[0]
    stale = []
    for binding in holders:
        if binding in listed or binding == site or _is_source(binding, site):
            continue
        if binding.module.partition(".")[0] == package:
            raise _RefusedError(
                f"{binding} holds it by value and is not in also_bound: no reviewed release has this layout"
            )
        stale.append(binding)
    return listed, stale


def _is_source(binding: Binding, site: Binding) -> bool:
    # The base class of an inherited attribute.
    return binding.holder in getattr(site.holder, "__mro__", ()) and binding.name == site.name


def _import_replacement(manifest: Manifest) -> Any:
    """The factory of a patch, or its substitute."""
    target = Target.parse(manifest.replacement or manifest.substitute or "")
    try:
        importlib.import_module(target.module)
    except ImportError as error:
        raise _RefusedError(f"the replacement {target} cannot be imported: {error}") from error
    binding = find_loaded(target)
    found = None if binding is None else binding.read()
    if found is None or (manifest.replacement is not None and not callable(found)):
        raise _RefusedError(f"the replacement {target} does not exist")
    return found


def describe(value: Any) -> str:
    """The maker of an object: module, name, file and line."""
    function = plain_function(value)
    if value is None:
        return "nothing"
    code = getattr(function, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    module = getattr(function, "__module__", None) or type(function).__module__
    # A replacement made with functools.wraps has the original's names; its globals belong to its own module.
    module = getattr(function, "__globals__", {}).get("__name__", module)
    given = getattr(function, "__qualname__", type(function).__qualname__)
    name = given if code is None else code.co_qualname
    return f"{module}.{name}{where}"
