"""The files under `patches/`: the attributes that are replaced, their replacements, and the reviewed releases.

`judge` decides whether a patch fits a release, from its manifest and the source text of that release.
"""

import functools
import hashlib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import yaml
from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.merge import SafeLoader
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.config.section import Section
from megatron_overlap.patching.source import Definition, SourceTree, Target, definitions, megatron_release

TargetName = Annotated[str, AfterValidator(lambda text: str(Target.parse(text)))]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Reason = Annotated[str, Field(min_length=20)]


class ReviewedRelease(Section):
    """The source of the target in one release that a person reviewed."""

    signature: str
    digest: Digest
    relies_on: dict[TargetName, Digest | None] = {}
    """Digests of the symbols of `Manifest.relies_on`; null for a symbol that this release lacks."""


class Manifest(Section):
    """One replaced attribute.

    Attributes:
        target: the attribute, `module:name` or `module:Class.name`.
        replacement: a factory `(original, session) -> object`; the object takes the target's place.
        substitute: the object itself, instead of a factory; only with `unchecked`.
        feature: patches of one feature are applied together or not at all.
        why: the reason for this place.
        requires: a module without which the target does not exist; the patch is then absent, not refused.
        missing_from: releases that have no target; the patch is absent there, not refused.
        also_bound: attributes that hold the target by value and are replaced with it.
        relies_on: other symbols whose source the replacement repeats or expects.
        releases: the reviewed releases. The target's source is compared with them.
        unchecked: why the source is not compared. The patch then replaces this attribute alone, whatever it holds.
    """

    target: TargetName
    replacement: TargetName | None = None
    substitute: TargetName | None = None
    feature: str
    why: Reason
    requires: str | None = None
    missing_from: list[str] = []
    also_bound: list[TargetName] = []
    relies_on: list[TargetName] = []
    releases: dict[str, ReviewedRelease] = {}
    unchecked: Reason | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if bool(self.releases) == bool(self.unchecked):
            raise ValueError("give releases, or the reason in unchecked, and not both")
        if (self.replacement is None) == (self.substitute is None):
            raise ValueError("give replacement or substitute, and not both")
        if self.substitute is not None and self.unchecked is None:
            raise ValueError("a substitute needs unchecked; give a factory in replacement")
        for name, release in self.releases.items():
            if set(release.relies_on) != set(self.relies_on):
                differing = ", ".join(sorted(set(release.relies_on) ^ set(self.relies_on)))
                raise ValueError(f"release {name} and relies_on differ in {differing}")
        return self


class Permit(Section):
    """What a run without a GPU permits because of the patches of one file under `patches/cpu/`.

    Attributes:
        name: the file without its suffix.
        targets: targets of the file; none where the adaptation is not a patch.
        what: what the run does or accepts.
        on_gpu: what a machine with a GPU does instead.
        without: regular expression of what a small run prints without this adaptation.
        remedy: for the user where a GPU refuses it; a rehearsal of a launch on GPUs then refuses it too.
    """

    name: str
    targets: list[TargetName]
    what: Reason
    on_gpu: Reason
    without: str
    remedy: Reason | None = None


def load_manifest_file(path: Path) -> list[Manifest]:
    """Reads the manifests of one file, without its `permits`.

    A file holds the keys of one `Manifest`, or `targets`: a mapping of targets to the keys that differ between them,
    beside the keys that they share. Raises ConfigError if the file is not readable YAML or describes no patch.
    """
    content = _mapping(path)
    content.pop("permits", None)
    if "targets" not in content:
        return [_validated(path, "", content, Manifest)]
    targets = content.pop("targets")
    if not isinstance(targets, dict) or not all(isinstance(keys, dict) for keys in targets.values()):
        remedy = "write a mapping of targets to mappings of keys"
        raise ConfigError(str(path), "targets", type(targets).__name__, remedy)
    return [
        _validated(path, f"targets.{target}.", {**content, "target": target, **keys}, Manifest)
        for target, keys in targets.items()
    ]


def load_permits() -> list[Permit]:
    """One entry per file under `patches/cpu/`. Raises ConfigError if a file is wrong or has no `permits`."""
    permits = []
    for file in sorted((resource_folder("patches") / "cpu").glob("*.yaml")):
        keys = _mapping(file).get("permits")
        targets = [manifest.target for manifest in load_manifest_file(file)]
        content = {**keys, "name": file.stem, "targets": targets} if isinstance(keys, dict) else {}
        permits.append(_validated(file, "permits.", content, Permit))
    return permits


@functools.cache
def load_manifests(folder: Path | None = None) -> tuple[Manifest, ...]:
    """Reads every `*.yaml` of a folder and its subfolders, sorted by path; None: this package's own manifests.

    Raises ConfigError if a file is wrong, the folder has no file, or two manifests have the same target.
    """
    folder = folder or resource_folder("patches")
    files = sorted(folder.rglob("*.yaml"))
    if not files:
        raise ConfigError(str(folder), "*.yaml", None, "no such file; reinstall megatron-overlap")
    manifests: dict[str, Manifest] = {}
    for file in files:
        for manifest in load_manifest_file(file):
            if manifest.target in manifests:
                raise ConfigError(str(file), "target", manifest.target, "another file has it; merge the two")
            manifests[manifest.target] = manifest
    return tuple(manifests.values())


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(str(path), "(file)", error, "write a readable YAML file") from error
    if not isinstance(content, dict):
        raise ConfigError(str(path), "(file)", type(content).__name__, "write a mapping with target, why, ...")
    return content


def _validated[Kind: BaseModel](path: Path, prefix: str, content: dict[str, Any], kind: type[Kind]) -> Kind:
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(map(str, first["loc"])) or "(file)"
        raise ConfigError(str(path), key, repr(first["input"]), first["msg"]) from error


class Verdict(StrEnum):
    """Whether a patch may be applied."""

    APPLIES = "applies"
    UNREVIEWED = "applies unreviewed"
    REFUSED = "refused"
    ABSENT = "absent"


NOT_APPLIED = (Verdict.REFUSED, Verdict.ABSENT)


class Judgement(NamedTuple):
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    reason: str


_OPTIONAL_PACKAGE = "megatron.training"  # the training loop; some wheels of megatron-core lack it
NOT_COMPARED = Judgement(Verdict.APPLIES, "not compared")  # of every patch with `unchecked`


def judge(manifest: Manifest, definition: Definition, tree: SourceTree) -> Judgement:
    """Compares a definition, and the symbols that the replacement relies on, with the reviewed releases."""
    here = megatron_release(tree) or "this version"
    changed = {
        name: _changed(manifest, release, definition, tree)
        for name, release in manifest.releases.items()
        if release.signature == definition.signature
    }
    if not changed:
        known = ", ".join(sorted({release.signature for release in manifest.releases.values()}))
        reason = f"{here} has the signature {definition.signature}, and only {known} was reviewed"
        return Judgement(Verdict.REFUSED, f"{reason}; use a reviewed release, or a newer megatron-overlap")
    equal = [name for name, names in changed.items() if not names]
    if here in equal:
        return Judgement(Verdict.APPLIES, f"{here} was reviewed")
    if equal:
        return Judgement(Verdict.APPLIES, f"{here} has the same source as {equal[-1]}, which was reviewed")
    nearest = here if here in changed else min(reversed(changed), key=lambda name: len(changed[name]))
    difference = f"{here} differs from the reviewed release {nearest} in {', '.join(changed[nearest])}"
    return Judgement(Verdict.UNREVIEWED, f"{difference}; compare a few steps with the stock path before you rely on it")


def judge_source(manifest: Manifest, tree: SourceTree) -> Judgement:
    """Judges a patch by a source tree. `Engine.plan` also finds what exists only in a running process."""
    target = Target.parse(manifest.target)
    here = megatron_release(tree) or "this version"
    if f"{target.module}.".startswith(f"{_OPTIONAL_PACKAGE}.") and tree.read(_OPTIONAL_PACKAGE) is None:
        return Judgement(Verdict.ABSENT, f"{here} has no {_OPTIONAL_PACKAGE}")
    if here in manifest.missing_from:
        return Judgement(Verdict.ABSENT, f"{here} has no {target.qualname}")
    if manifest.unchecked is not None:
        return NOT_COMPARED
    found = definitions(tree, target)
    if not found:
        return Judgement(Verdict.REFUSED, f"{here} has no {target.qualname} in {target.module}")
    # Where the source defines the target in several branches of an `if`, the worst judgement counts.
    order = list(Verdict)
    return max((judge(manifest, each, tree) for each in found), key=lambda each: order.index(each.verdict))


def digest_of(tree: SourceTree, name: str) -> str | None:
    """One digest of all that a tree defines under `module:qualname`; None where it defines nothing."""
    digests = [definition.digest for definition in definitions(tree, Target.parse(name))]
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _changed(manifest: Manifest, release: ReviewedRelease, definition: Definition, tree: SourceTree) -> list[str]:
    names = [] if release.digest == definition.digest else [Target.parse(manifest.target).qualname]
    for name, digest in release.relies_on.items():
        if digest_of(tree, name) != digest:
            names.append(Target.parse(name).qualname)
    return names
