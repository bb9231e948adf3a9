"""The files under `patches/`: the attributes that are replaced, their replacements, and the reviewed releases."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from megatron_overlap.config.resources import resource_folder
from megatron_overlap.patching.errors import ManifestError
from megatron_overlap.patching.source import Target


def _target(text: str) -> str:
    Target.parse(text)
    return text


def _digest(text: str) -> str:
    if len(text) != 64 or set(text) - set("0123456789abcdef"):
        raise ValueError("a digest has 64 lower-case hexadecimal digits; scripts/survey_seams.py prints it")
    return text


_SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser of libyaml is ten times faster, and every `enable` reads all files."""

TargetName = Annotated[str, AfterValidator(_target)]
Digest = Annotated[str, AfterValidator(_digest)]
Reason = Annotated[str, Field(min_length=20)]


class ReviewedRelease(BaseModel):
    """The source of the target in one release that a person reviewed.

    `relies_on` has the digests of other symbols whose behaviour the replacement repeats or expects; null for a symbol
    that this release lacks.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    signature: str
    digest: Digest
    relies_on: dict[TargetName, Digest | None] = {}


class Manifest(BaseModel):
    """One replaced attribute.

    Attributes:
        target: the attribute, `module:name` or `module:Class.name`.
        replacement: a factory `(original, session) -> object`; the object takes the target's place.
        substitute: the object itself, instead of a factory; only with `unchecked`.
        feature: patches of one feature are applied together or not at all.
        why: the reason for this place.
        also_bound: attributes that hold the target by value and are replaced with it.
        relies_on: other symbols whose source the replacement repeats or expects.
        releases: the reviewed releases. The target's source is compared with them.
        unchecked: why the source is not compared. The patch then replaces this attribute alone, whatever it holds.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: TargetName
    replacement: TargetName | None = None
    substitute: TargetName | None = None
    feature: str
    why: Reason
    also_bound: list[TargetName] = []
    relies_on: list[TargetName] = []
    releases: dict[str, ReviewedRelease] = {}
    unchecked: Reason | None = None

    @model_validator(mode="after")
    def _is_complete(self) -> Manifest:
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


def patches_folder() -> Path:
    """The folder of the manifests: a package resource in a wheel, the repository's folder in an editable install."""
    return resource_folder("patches")


def load_manifest_file(path: Path) -> list[Manifest]:
    """Reads the manifests of one file.

    A file holds the keys of one `Manifest`, or `targets`: a mapping of targets to the keys that differ between them,
    beside the keys that they share.

    Raises:
        ManifestError: the file is unreadable, is not YAML, or does not describe a patch.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _SafeLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{path}: {' '.join(str(error).split())}: write a readable YAML file") from error
    if not isinstance(content, dict):
        raise ManifestError(f"{path}: {type(content).__name__}: write a mapping with target, why, ...")
    if "targets" not in content:
        return [_validated(path, "", content)]
    targets = content.pop("targets")
    if not isinstance(targets, dict) or not all(isinstance(keys, dict) for keys in targets.values()):
        raise ManifestError(
            f"{path}: targets: {type(targets).__name__}: write a mapping of targets to mappings of keys"
        )
    return [
        _validated(path, f"targets.{target}.", {**content, "target": target, **keys})
        for target, keys in targets.items()
    ]


def load_manifests(folder: Path | None = None) -> list[Manifest]:
    """Reads every `*.yaml` of a folder and its subfolders (default: this package's own), sorted by path.

    Raises:
        ManifestError: a file is wrong, the folder has no file, or two manifests have the same target.
    """
    folder = patches_folder() if folder is None else folder
    files = sorted(folder.rglob("*.yaml"))
    if not files:
        raise ManifestError(f"{folder}: no *.yaml here: reinstall megatron-overlap")
    manifests: dict[str, Manifest] = {}
    for file in files:
        for manifest in load_manifest_file(file):
            if manifest.target in manifests:
                raise ManifestError(f"{file}: target: {manifest.target}: another file has it; merge the two")
            manifests[manifest.target] = manifest
    return list(manifests.values())


def _validated(path: Path, prefix: str, content: dict[str, Any]) -> Manifest:
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = prefix + ".".join(map(str, first["loc"])) or "the whole file"
        value = "" if isinstance(first["input"], dict) else f" {first['input']!r}:"
        raise ManifestError(f"{path}: {key}:{value} {first['msg']}") from error
