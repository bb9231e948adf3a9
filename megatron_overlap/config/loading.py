"""From files and overrides to checked configs; every way to be wrong becomes one ConfigError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from megatron_overlap.config.errors import ConfigError, did_you_mean
from megatron_overlap.config.explain import explain
from megatron_overlap.config.inputs import missing_inputs
from megatron_overlap.config.launch import LaunchConfig, LaunchSection
from megatron_overlap.config.merge import Composed, compose
from megatron_overlap.config.overlap import OverlapConfig

METHOD_SECTIONS = ("tensor", "data", "ulysses", "varlen")


@dataclass(frozen=True)
class OverlapFile:
    """What `--overlap-config FILE` says to a rank.

    Attributes:
        overlap: the overlap section.
        launch: the launch section, or its defaults.
        config: the whole launch config, None where the file has not all of it.
    """

    overlap: OverlapConfig
    launch: LaunchSection
    config: LaunchConfig | None


def load_launch_config(path: str | Path, overrides: Sequence[str] = (), *, inputs: bool = False) -> LaunchConfig:
    """Read, compose and check a launch config.

    Args:
        path: YAML file; its `base` files are read first, relative to it.
        overrides: `key=value` texts, applied last; `overlap.*.method=none` reaches every method.
        inputs: also look whether the files it names (data, script, checkpoint) are there.

    Raises:
        ConfigError: a file, key, value or combination is wrong.
    """
    composed = compose(path, overrides, METHOD_SECTIONS)
    config = _validate(LaunchConfig, composed)
    if inputs:
        for problem in missing_inputs(config):
            raise ConfigError(composed.source_of(problem.key), problem.key, problem.value, problem.remedy)
    return config


def load_overlap_file(path: str | Path, overrides: Sequence[str] = ()) -> OverlapFile:
    """Read the file of `--overlap-config`: a launch config, some of its sections, or overlap's keys alone.

    Raises:
        ConfigError: a file, key, value or combination is wrong.
    """
    composed = compose(path, overrides, METHOD_SECTIONS)
    tree = composed.tree
    if "model" in tree and "train" in tree:
        config = _validate(LaunchConfig, composed)
        return OverlapFile(config.overlap, config.launch, config)
    bare = set(OverlapConfig.model_fields) - {"data"}
    if "overlap" not in tree and set(tree) & bare:
        return OverlapFile(_validate(OverlapConfig, composed), LaunchSection(), None)
    for key in tree:
        if key not in LaunchConfig.model_fields:
            remedy = did_you_mean(key, [*LaunchConfig.model_fields, "base"])
            raise ConfigError(composed.source_of(key), key, tree[key], remedy)
    return OverlapFile(
        _validate(OverlapConfig, composed, "overlap"), _validate(LaunchSection, composed, "launch"), None
    )


def dump_config(config: LaunchConfig | OverlapConfig) -> str:
    """The config as YAML text that reads back equal, presets and bases resolved."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def without_overlap(config: LaunchConfig) -> LaunchConfig:
    """The same launch without the plugin: every overlap method none, `_baseline` added to the name.

    Megatron's own data parallel overlap stays as it is: a comparison counts what the plugin adds, no more. Under
    context parallelism Ulysses stays too, with its all-to-alls exposed: Megatron's local layers have no other. Where
    documents are read as they are, they still are, every one cut over all ranks.
    """
    overlap = config.overlap
    ulysses = {**overlap.ulysses.model_dump(), "method": "none"}
    varlen = overlap.varlen.model_dump()
    if varlen["method"] in ("balanced", "all_gather"):
        varlen["method"] = "ring"
    if config.parallel.context > 1 and varlen["method"] == "none" and config.train.transformer_impl == "local":
        ulysses = {**overlap.ulysses.model_dump(), "schedule": "serial"}
    data = "none" if overlap.data.method == "none" else "megatron"
    off = {
        **overlap.model_dump(),
        "tensor": {**overlap.tensor.model_dump(), "method": "none"},
        "data": {"method": data},
        "ulysses": ulysses,
        "varlen": varlen,
    }
    return LaunchConfig.model_validate({**config.model_dump(), "name": f"{config.name}_baseline", "overlap": off})


def _validate[Model: BaseModel](model: type[Model], composed: Composed, section: str = "") -> Model:
    tree: Any = composed.tree.get(section) if section else composed.tree
    try:
        return model.model_validate({} if section and tree is None else tree)
    except ValidationError as error:
        errors = error.errors()
        # A key that was misspelt makes another one missing: the first is the one to tell.
        unknown = [item for item in errors if item["type"] == "extra_forbidden"]
        raise explain(model, (unknown or errors)[0], composed, section) from error
