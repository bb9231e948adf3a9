"""Read and validate configs from YAML files and overrides. Every error is a `ConfigError`."""

import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import model_validator

from megatron_overlap.config.errors import ConfigError, Problem, did_you_mean, raise_first
from megatron_overlap.config.launch import LaunchFields, LaunchSection
from megatron_overlap.config.megatron_args import EXPERT_PARALLEL, TWO_MICROBATCHES, data_prefix, number_after
from megatron_overlap.config.merge import Composed, compose
from megatron_overlap.config.overlap import DataOverlap, OverlapFields
from megatron_overlap.config.section import validate
from megatron_overlap.config.validation import launch_problems


class OverlapConfig(OverlapFields):
    """What is overlapped and how. Given to `megatron_overlap.enable`."""

    @classmethod
    def from_yaml(cls, path: str | Path, overrides: Sequence[str] = ()) -> "OverlapConfig":
        """Read a launch config, or a file with the overlap section alone. Overrides are `key=value` texts."""
        return load_overlap_file(path, overrides)[0]


class LaunchConfig(LaunchFields):
    """A whole launch."""

    overlap: OverlapConfig = OverlapConfig()

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_first(launch_problems(self))
        return self

    @property
    def expert_parallel_size(self) -> int:
        """Ranks that share the experts of a layer, from `megatron_args`."""
        return number_after(EXPERT_PARALLEL, self.megatron_args) or 1


def load_launch_config(path: str | Path, overrides: Sequence[str] = (), *, inputs: bool = False) -> LaunchConfig:
    """Read, merge and validate a launch config; with `inputs` also check that its data, script and checkpoint exist,
    and make the folder of `train.save`.

    The `base` files are read first: files relative to `path`, or names of shipped configs. Overrides are `key=value`
    texts, applied last; `overlap.*.method=none` reaches every method.
    """
    composed = _compose(path, overrides, is_launch=True)
    config = validate(LaunchConfig, composed)
    if inputs:
        for problem in chain(missing_inputs(config), unwritable_outputs(config)):
            raise ConfigError(composed.source_of(problem.key), problem.key, problem.value, problem.remedy)
    return config


def _compose(path: str | Path, overrides: Sequence[str], *, is_launch: bool = False) -> Composed:
    """The merged file. The default name is `my` for `my.yaml`, and `NAME_overlap` for `gpu/NAME/overlap.yaml`."""
    composed = compose(path, overrides, ("tensor", "data", "ulysses", "expert", "varlen"))
    if is_launch or {"model", "train"} <= set(composed.tree):
        file = Path(path).resolve()
        folders = f"{file.parent.name}_" if file.parent.parent.name in ("cpu", "gpu") else ""
        composed.tree.setdefault("name", f"{folders}{file.stem}")
    return composed


def missing_inputs(cfg: LaunchConfig) -> Iterator[Problem]:
    """Inputs that a config names and that do not exist, with the remedy."""
    entry, load, data = cfg.launch.entry, cfg.train.load, cfg.data
    if entry is not None and not Path(entry).is_file():
        yield Problem("launch.entry", entry, "no such file; give a training script, or null")
    if load is not None and not Path(load).is_dir():
        yield Problem("train.load", load, "no such folder; give a folder of checkpoints, or null")
    if data.path is None:
        return
    prefix = data_prefix(data.kind, data.path)
    for ending in (".bin", ".idx"):
        if not Path(prefix + ending).is_file():
            folder = data.path if data.kind == "text" else str(Path(data.path).parent)
            remedy = f"no file {prefix}{ending}; make it with scripts/prepare_data.py --output {folder}"
            yield Problem("data.path", data.path, remedy)
    if data.kind != "text":
        return
    source = Path(data.path)
    try:
        size = int(json.loads((source / "data.json").read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        remedy = f"no readable data.json in it; make it again with scripts/prepare_data.py --output {source}"
        yield Problem("data.path", str(source), remedy)
    else:
        if size > cfg.model.vocab_size:  # an id outside the embedding fails inside a step
            remedy = f"the data has ids up to {size - 1}; use a vocab_size of at least {size}"
            yield Problem("model.vocab_size", cfg.model.vocab_size, remedy)


def unwritable_outputs(cfg: LaunchConfig) -> Iterator[Problem]:
    """A folder of checkpoints that cannot be made or written. Makes the folder."""
    if cfg.train.save is not None:
        folder = Path(cfg.train.save)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            reason = None if os.access(folder, os.W_OK | os.X_OK) else "permission denied"
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
        if reason is not None:
            yield Problem("train.save", cfg.train.save, f"cannot be written ({reason}); give another folder, or null")


def load_overlap_file(path: str | Path, overrides: Sequence[str] = ()) -> tuple[OverlapConfig, LaunchSection]:
    """Read the file of `--overlap-config`: a launch config, some of its sections, or overlap's keys alone."""
    composed = _compose(path, overrides)
    tree = composed.tree
    if "model" in tree and "train" in tree:
        config = validate(LaunchConfig, composed)
        return config.overlap, config.launch
    bare = set(OverlapConfig.model_fields) - {"data"}
    if "overlap" not in tree and set(tree) & bare:
        return validate(OverlapConfig, composed), LaunchSection()
    for key in tree:
        if key not in LaunchConfig.model_fields:
            remedy = did_you_mean(key, [*LaunchConfig.model_fields, "base"])
            raise ConfigError(composed.source_of(key), key, tree[key], remedy)
    data = tree.get("data")
    if isinstance(data, dict) and set(data) & set(DataOverlap.model_fields):
        remedy = "here it is the data set; write `overlap: {data: ...}`"
        raise ConfigError(composed.source_of("data"), "data", data, remedy)
    return validate(OverlapConfig, composed, "overlap"), validate(LaunchSection, composed, "launch")


def dump_config(config: LaunchConfig | OverlapConfig) -> str:
    """The config as YAML text with resolved presets and bases."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def without_overlap(config: LaunchConfig) -> LaunchConfig:
    """The same launch without the plugin: every overlap method none, `_baseline` added to the name.

    Megatron's data parallel overlap stays. Ulysses stays with exposed all-to-alls where Megatron has no context
    parallelism: in local layers, and on the CPU. Variable-length attention becomes `ring`.
    """
    off = config.overlap.model_dump()
    off["tensor"]["method"] = "none"
    off["deterministic"] = bool(off["deterministic"])  # the stock path is not tp_invariant
    off["data"] = {"method": "none" if config.overlap.data.method == "none" else "stock"}
    off["expert"] = {"method": "none"}
    if off["varlen"]["method"] in ("balanced", "all_gather"):
        off["varlen"]["method"] = "ring"
    has_stock = config.train.transformer_impl != "local" and config.launch.device != "cpu"
    if config.parallel.context > 1 and off["varlen"]["method"] == "none" and not has_stock:
        off["ulysses"]["schedule"] = "serial"
    else:
        off["ulysses"]["method"] = "none"
    return LaunchConfig.model_validate({**config.model_dump(), "name": f"{config.name}_baseline", "overlap": off})


def arms(config: LaunchConfig) -> tuple[LaunchConfig, ...]:
    """The runs of a comparison: without the plugin, with it, and, where they apply, the overlaps of others.

    `NAME_userbuffers` is the stock path with `--tp-comm-overlap`. It needs TransformerEngine layers with sequence
    parallelism on GPUs. `NAME_1f1b` is the stock path with `--overlap-moe-expert-parallel-comm`. It needs expert
    parallelism on GPUs without tensor, context and pipeline parallelism and without full recomputation.
    """
    off, train, parallel = without_overlap(config), config.train, config.parallel
    others: list[dict[str, Any]] = []
    on_gpus = config.launch.device == "cuda" and train.transformer_impl == "transformer_engine"
    if on_gpus and parallel.sequence_parallel and not train.tp_comm_overlap:
        others.append({"name": f"{config.name}_userbuffers", "train": {**train.model_dump(), "tp_comm_overlap": True}})
    one_stage = parallel.model_size == 1 and train.recompute != "full"
    args = config.megatron_args
    if on_gpus and one_stage and config.expert_parallel_size > 1 and TWO_MICROBATCHES not in args:
        others.append({"name": f"{config.name}_1f1b", "megatron_args": (*args, TWO_MICROBATCHES)})
    return off, config, *(LaunchConfig.model_validate({**off.model_dump(), **each}) for each in others)


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file: the launch config with `base`, and optional keys for presets."""
    schema = LaunchConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["base"] = {
        "description": "Base config files, relative to this file, or names of shipped ones.",
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
    }
    # Keys are optional in a file with a base and in a section with a preset; the name of the file is the default name.
    required = [key for key in schema.pop("required") if key != "name"]
    schema["anyOf"] = [{"required": ["base"]}, {"required": required}]
    for section in schema["$defs"].values():
        section.pop("required", None)
    return schema


def schema() -> None:
    """Print the JSON Schema of launch configs."""
    print(json.dumps(json_schema(), indent=2))
