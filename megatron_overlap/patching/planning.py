"""Examines the running process: the object at each target, who made it, and which attributes hold it by value."""

import contextlib
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

from megatron_overlap.patching.manifest import NOT_APPLIED, NOT_COMPARED, Manifest, Verdict, judge
from megatron_overlap.patching.source import Definition, ImportedTree, Target, definitions, megatron_release

_DEPENDENCIES = sys.stdlib_module_names | {
    *("torch", "sympy", "wandb", "cuda", "numpy", "mpmath", "triton", "omegaconf", "tensorboard", "google", "absl"),
    *("onnx", "onnx_ir", "onnxscript", "pydantic", "pydantic_core", "rich", "setuptools", "_pytest", "psutil"),
}
"""Packages that never import Megatron or TransformerEngine; they have nine tenths of all attributes."""

_UNDO = "undo that first, or enable this plugin before"


class _RefusedError(Exception):
    """Ends the planning of one patch; caught in this module."""


@dataclass(frozen=True)
class Binding:
    """An attribute `name` of a module or class."""

    holder: Any
    name: str

    @property
    def module(self) -> str:
        """Name of the module that has the attribute."""
        return str(self.holder.__name__ if isinstance(self.holder, ModuleType) else self.holder.__module__)

    @property
    def qualname(self) -> str:
        """Name of the attribute in the module."""
        return self.name if isinstance(self.holder, ModuleType) else f"{self.holder.__qualname__}.{self.name}"

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"

    def read(self) -> Any:
        """The raw value in the holder's own namespace, without descriptors; None where it is inherited or missing."""
        return _namespace(self.holder).get(self.name)


def find_loaded(target: Target) -> Binding | None:
    """The attribute that a target names, if its module is imported and all but the last name exist."""
    holder: Any = sys.modules.get(target.module)
    *outer, name = target.qualname.split(".")
    for part in outer:
        holder = None if holder is None else _namespace(holder).get(part)
    return None if holder is None else Binding(holder, name)


def bindings_of(*objects: object) -> list[list[Binding]]:
    """For each object, every attribute of an imported module, or of a class in one, that holds this object.

    The search covers the packages of `_DEPENDENCIES` only for objects that they define.
    """
    found: dict[int, list[Binding]] = {id(each): [] for each in objects}
    packages = {str(getattr(each, "__module__", "builtins")).partition(".")[0] for each in objects}
    without = _DEPENDENCIES if packages.isdisjoint(_DEPENDENCIES) else frozenset()
    for holder, names in _holders(without) if found else ():
        if found.keys().isdisjoint(map(id, list(names.values()))):
            continue
        for name, value in list(names.items()):
            if id(value) in found:
                found[id(value)].append(Binding(holder, name))
    return [found[id(each)] for each in objects]


def _holders(without: frozenset[str]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The modules and classes of all packages but `without`, with their namespaces, to which other threads may add."""
    seen: set[int] = set()
    for key, module in list(sys.modules.items()):
        if key.partition(".")[0] in without:
            continue
        # sys.modules may hold any object. Only real modules are searched, and never with getattr: a lazy module would
        # import something.
        if not _is_a(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        namespace = _namespace(module)
        if str(namespace.get("__name__")).partition(".")[0] in without:
            continue
        yield module, namespace
        # The test of `_is_a` inline: it runs a million times.
        values = list(namespace.values())
        for value in [each for each in values if issubclass(type(each), type) and id(each) not in seen]:
            if id(value) in seen:
                continue
            seen.add(id(value))
            namespace = type.__getattribute__(value, "__dict__")
            if str(namespace.get("__module__")).partition(".")[0] not in without:
                yield value, namespace


def _namespace(holder: Any) -> Mapping[str, Any]:
    # Not vars() or getattr(): a lazy module would import something.
    base = type if _is_a(holder, type) else object
    namespace: Mapping[str, Any] = base.__getattribute__(holder, "__dict__")
    return namespace


def _is_a(value: object, kind: type) -> bool:
    # Not isinstance(): it reads `value.__class__`, for which a proxy such as torch.distributed.reduce_op returns the
    # class of another object, or warns.
    return issubclass(type(value), kind)


@dataclass(frozen=True)
class Finding:
    """The result of planning one patch.

    Attributes:
        stale: attributes outside the target's package that hold the original by value. They are not replaced, and calls
            through them run the stock path.
        places: the target's attribute, then those that are replaced with it.
        original: the raw value of the target.
        own: whether the holder of the target has the attribute itself, and not by inheritance.
        made_by: the factory, or the substitute.
    """

    manifest: Manifest
    verdict: Verdict
    reason: str
    stale: tuple[str, ...] = ()
    places: tuple[Binding, ...] = field(default=(), repr=False)
    original: Any = field(default=None, repr=False)
    own: bool = True
    made_by: Any = field(default=None, repr=False)

    def held_by(self, place: Binding) -> Any:
        """What the holder of one of `places` has there itself while the patch is not applied; None: nothing."""
        return None if place is self.places[0] and not self.own else self.original


@dataclass(frozen=True)
class Plan:
    """The findings of one examination of the process."""

    findings: tuple[Finding, ...]

    def of(self, features: Collection[str]) -> "Plan":
        """The findings of these features."""
        return Plan(tuple(finding for finding in self.findings if finding.manifest.feature in features))

    @property
    def refused(self) -> list[Finding]:
        """The patches that must not be applied."""
        return [finding for finding in self.findings if finding.verdict is Verdict.REFUSED]

    @property
    def applicable(self) -> list[Finding]:
        """The patches that may be applied."""
        return [finding for finding in self.findings if finding.verdict not in NOT_APPLIED]


def plan_patches(manifests: Iterable[Manifest]) -> tuple[Finding, ...]:
    """Imports the modules of all targets and replacements, examines the targets, and changes nothing."""
    tree = ImportedTree()
    findings = [_or_refused(manifest, _examine, manifest, tree) for manifest in manifests]
    # One search for all patches, after the last import of any: it reads every attribute in sys.modules.
    holders = iter(bindings_of(*(each.original for each in findings if _is_compared(each))))
    return tuple(
        _or_refused(each.manifest, _with_bindings, each, next(holders)) if _is_compared(each) else each
        for each in findings
    )


def _is_compared(finding: Finding) -> bool:
    return finding.verdict not in NOT_APPLIED and finding.manifest.unchecked is None


def _or_refused[**P](manifest: Manifest, step: Callable[P, Finding], *args: P.args, **kwargs: P.kwargs) -> Finding:
    try:
        return step(*args, **kwargs)
    except _RefusedError as refusal:
        return Finding(manifest, Verdict.REFUSED, str(refusal))


def _examine(manifest: Manifest, tree: ImportedTree) -> Finding:
    target = Target.parse(manifest.target)
    if manifest.requires is not None:
        with contextlib.suppress(ImportError):
            importlib.import_module(target.module)
        if manifest.requires not in sys.modules:
            return Finding(manifest, Verdict.ABSENT, f"needs {manifest.requires.split('.')[0]}")
    if manifest.missing_from and (release := megatron_release(tree)) in manifest.missing_from:
        return Finding(manifest, Verdict.ABSENT, f"{release} has no {target.qualname}")
    site, place = _resolve(target)
    original = place.read()
    judgement = NOT_COMPARED
    if manifest.unchecked is None:
        for name in manifest.relies_on:
            # The imported source is judged; a module that cannot be imported is then reported as missing.
            with contextlib.suppress(ImportError):
                importlib.import_module(Target.parse(name).module)
        judgement = judge(manifest, _definition_of(place, original, tree), tree)
        if judgement.verdict is Verdict.REFUSED:
            raise _RefusedError(judgement.reason)
    own, made_by = place.holder is site.holder, _import_replacement(manifest)
    return Finding(manifest, *judgement, places=(site,), original=original, own=own, made_by=made_by)


def _resolve(target: Target) -> tuple[Binding, Binding]:
    """The attribute of the target, and the one that holds its value: that of a base class where it is inherited."""
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
            now = f"{site.module}.{site.holder.__qualname__}: another package replaced the class"
            raise _RefusedError(f"{':'.join(expected)} is now {now}; {_UNDO}")
    for owner in (site.holder,) if isinstance(site.holder, ModuleType) else site.holder.__mro__:
        place = Binding(owner, site.name)
        if place.read() is not None:
            return site, place
    raise _RefusedError(f"{target.module} has no {target.qualname}")


def plain_function(raw: Any) -> Any:
    """The function inside a static or class method; any other object as it is."""
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _definition_of(place: Binding, raw: Any, tree: ImportedTree) -> Definition:
    """The statement in the source that made `raw`; refuses an object that another package put there."""
    found = definitions(tree, Target(place.module, place.qualname))
    if not found:
        reason = f"{place} is {describe(raw)}: another package replaced it, or it was moved; undo that first"
        if tree.read(place.module) is None:
            reason = f"the source of {place.module} is not readable, so it cannot be compared with a reviewed release"
        raise _RefusedError(reason)
    function, num_wrappers = plain_function(raw), 0
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        function, num_wrappers = inner, num_wrappers + 1
    code: Any = getattr(function, "__code__", None)
    for definition in found if code is not None else ():
        file, same_line = code.co_filename, code.co_firstlineno == definition.line
        same_file = file == definition.file or os.path.realpath(file) == os.path.realpath(definition.file)
        if num_wrappers <= definition.num_decorators and same_line and same_file:
            return definition
    raise _RefusedError(f"{place} was already replaced by {describe(raw)}; {_UNDO}")


def _with_bindings(finding: Finding, holders: Iterable[Binding]) -> Finding:
    """Splits the attributes that hold the original by value into listed and foreign ones; refuses unlisted ones."""
    (site,), original = finding.places, finding.original
    function = plain_function(original)
    listed: list[Binding] = []
    for name in finding.manifest.also_bound:
        binding = find_loaded(Target.parse(name))
        if binding is None or (held := binding.read()) is None:
            continue
        if held is not function and held is not original:
            raise _RefusedError(f"{binding} must hold the target and holds {describe(held)}; undo that first")
        listed.append(binding)
    package = site.module.partition(".")[0]
    stale = []
    for binding in holders:
        is_inherited = binding.holder in getattr(site.holder, "__mro__", ()) and binding.name == site.name
        if binding in listed or binding == site or is_inherited:
            continue
        if binding.module.partition(".")[0] == package:
            reason = "holds it by value and is not in also_bound: no reviewed release has this layout"
            raise _RefusedError(f"{binding} {reason}")
        stale.append(str(binding))
    return replace(finding, stale=tuple(stale), places=(site, *listed))


def _import_replacement(manifest: Manifest) -> Any:
    name = manifest.replacement or manifest.substitute or ""
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise _RefusedError(f"the replacement {name} cannot be imported: {error}") from error


def describe(value: Any) -> str:
    """The maker of an object: module, name, file and line."""
    if value is None:
        return "nothing"
    function = plain_function(value)
    module = getattr(function, "__module__", None) or type(function).__module__
    code: Any = getattr(function, "__code__", None)
    if code is None:
        return f"{module}.{getattr(function, '__qualname__', type(function).__qualname__)}"
    # A replacement made with functools.wraps has the original's names; its globals belong to its own module.
    module = getattr(function, "__globals__", {}).get("__name__", module)
    return f"{module}.{code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"
