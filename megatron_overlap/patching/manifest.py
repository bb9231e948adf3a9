"""The files under `patches/`: one Megatron symbol each, what replaces it, and the releases that were read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

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


TargetName = Annotated[str, AfterValidator(_target)]
Digest = Annotated[str, AfterValidator(_digest)]


class ReadRelease(BaseModel):
    """What one release has at the target, as somebody read it.

    `relies_on` gives the digests of the other symbols whose behaviour the replacement repeats or expects; null
    for one that this release does not have.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    signature: str
    digest: Digest
    relies_on: dict[TargetName, Digest | None] = {}


class Manifest(BaseModel):
    """One replaced attribute.

    `replacement` names a factory `(original, session) -> callable`. `feature` is the section of the overlap
    config that asks for it; the patches of one feature are applied together or not at all. `also_bound` lists
    places that hold the target by value and have to be rebound with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    target: TargetName
    replacement: TargetName
    feature: str
    why: Annotated[str, Field(min_length=20)]
    also_bound: list[TargetName] = []
    relies_on: list[TargetName] = []
    releases: Annotated[dict[str, ReadRelease], Field(min_length=1)]

    @model_validator(mode="after")
    def _every_release_covers_relies_on(self) -> Manifest:
        for name, release in self.releases.items():
            if set(release.relies_on) != set(self.relies_on):
                differing = ", ".join(sorted(set(release.relies_on) ^ set(self.relies_on)))
                raise ValueError(f"release {name} and relies_on differ in {differing}")
        return self


def patches_folder() -> Path:
    """The folder with the manifests: package data in a wheel, the repository's own in an editable install."""
    return resource_folder("patches")


def load_manifest(path: Path) -> Manifest:
    """Reads one manifest.

    Raises:
        ManifestError: the file is unreadable, is not YAML, or does not describe a patch.
    """
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ManifestError(f"{path}: {' '.join(str(error).split())}: write a readable YAML file") from error
    if not isinstance(content, dict):
        raise ManifestError(f"{path}: {type(content).__name__}: write a mapping with target, why, ...")
    try:
        return Manifest.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "the whole file"
        value = "" if isinstance(first["input"], dict) else f" {first['input']!r}:"
        raise ManifestError(f"{path}: {key}:{value} {first['msg']}") from error


def load_manifests(folder: Path | None = None) -> list[Manifest]:
    """Reads every `*.yaml` of a folder (default: this package's own), in the order of their names.

    Raises:
        ManifestError: a file is wrong, there is none, or two files have one target.
    """
    folder = patches_folder() if folder is None else folder
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise ManifestError(f"{folder}: no *.yaml here: reinstall megatron-overlap")
    manifests: list[Manifest] = []
    for file in files:
        manifest = load_manifest(file)
        if any(manifest.target == earlier.target for earlier in manifests):
            raise ManifestError(f"{file}: target: {manifest.target}: another file has it; merge the two")
        manifests.append(manifest)
    return manifests
