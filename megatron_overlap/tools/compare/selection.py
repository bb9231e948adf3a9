"""Which launches a comparison consists of, and whether they can be compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_overlap.config import ConfigError, LaunchConfig, without_overlap
from megatron_overlap.tools.compare.comparison import WARM_UP_ITERATIONS

# Runs that differ in one of these do not train the same, and their losses cannot agree.
_MUST_AGREE = ("model", "data.kind", "data.path", "data.split")
_MUST_AGREE_IN_TRAIN = (
    "seq_length",
    "global_batch_size",
    "iterations",
    "precision",
    "lr",
    "min_lr",
    "lr_decay_style",
    "lr_decay_iterations",
    "lr_warmup_iterations",
    "weight_decay",
    "clip_grad",
    "seed",
    "load",
)


@dataclass(frozen=True)
class Selection:
    """The launches of a comparison, the reference first.

    Attributes:
        configs: what is launched.
        serial: index of the run that sends the plugin's messages without overlap; None: there is none.
        notes: what a reader needs to know of how they were made.
    """

    configs: tuple[LaunchConfig, ...]
    serial: int | None
    notes: tuple[str, ...]


def select(given: Sequence[tuple[str, LaunchConfig]], *, attribute: bool) -> Selection:
    """Complete and check what is to be compared.

    Args:
        given: files and the configs read from them. One alone is compared with itself without overlap.
        attribute: add a run that sends the plugin's messages without overlap.

    Raises:
        ConfigError: they cannot be compared; one line that names the key.
    """
    file, overlapped = given[0] if len(given) == 1 else given[1]
    configs = [config for _, config in given]
    if len(given) == 1:
        configs = [without_overlap(overlapped), overlapped]
        if not _has_overlap(overlapped):
            remedy = "nothing to compare with itself: switch a method on, or give two configs"
            raise ConfigError(file, "overlap.tensor.method", overlapped.overlap.tensor.method, remedy)
    else:
        _same_training(given)
    needed = WARM_UP_ITERATIONS + 1
    if overlapped.train.iterations < needed:
        remedy = f"must be at least {needed}: the first {WARM_UP_ITERATIONS} of every launch are not timed"
        raise ConfigError(file, "train.iterations", overlapped.train.iterations, remedy)
    notes = []
    serial = None
    if attribute:
        serial = len(configs)
        configs.append(_serial(file, overlapped))
    if any(config.train.save is not None for config in configs):
        notes.append("Checkpoints are not saved (train.save is left out): one run's would be another's.")
        configs = [_changed(config, train={"save": None, "save_interval": None}) for config in configs]
    _different_names(file, configs)
    return Selection(tuple(configs), serial, tuple(notes))


def _has_overlap(config: LaunchConfig) -> bool:
    overlap = config.overlap
    ours = (overlap.tensor.method, overlap.ulysses.method, overlap.varlen.method)
    # Megatron's own overlap of data parallelism, the reference has as well; with one copy there is nothing to overlap.
    data = overlap.data.method == "p2p" or (overlap.data.method == "auto" and config.num_weight_copies > 1)
    return data or any(method != "none" for method in ours)


def _same_training(given: Sequence[tuple[str, LaunchConfig]]) -> None:
    first_file, first = given[0]
    for file, config in given[1:]:
        pairs = [
            *((key, _at(first, key), _at(config, key)) for key in _keys(first)),
            *((f"train.{key}", getattr(first.train, key), getattr(config.train, key)) for key in _MUST_AGREE_IN_TRAIN),
        ]
        for key, expected, found in pairs:
            if expected != found:
                remedy = f"must be {expected} as in {first_file}: runs are compared that train the same"
                raise ConfigError(file, key, found, remedy)


def _keys(config: LaunchConfig) -> list[str]:
    fields = [f"model.{name}" for name in type(config.model).model_fields if name != "preset"]
    return [*fields, *_MUST_AGREE[1:]]


def _at(config: LaunchConfig, key: str) -> object:
    node: object = config
    for part in key.split("."):
        node = getattr(node, part)
    return node


def _serial(file: str, config: LaunchConfig) -> LaunchConfig:
    """The same messages, but nothing is computed while they travel."""
    if config.parallel.context > 1 and config.parallel.tensor == 1:
        ulysses = {**config.overlap.ulysses.model_dump(), "schedule": "serial"}
        return _changed(config, name=f"{config.name}_serial", overlap={"ulysses": ulysses})
    method = config.overlap.tensor.method
    if method not in ("auto", "p2p"):
        remedy = "compare --attribute takes apart what p2p does; use auto or p2p"
        raise ConfigError(file, "overlap.tensor.method", method, remedy)
    tensor = {**config.overlap.tensor.model_dump(), "method": "p2p", "schedule": "serial"}
    return _changed(config, name=f"{config.name}_serial", overlap={"tensor": tensor})


def _changed(config: LaunchConfig, **sections: Mapping[str, Any] | str) -> LaunchConfig:
    """A config with some keys of some sections replaced, checked again."""
    dump = config.model_dump()
    for section, keys in sections.items():
        dump[section] = keys if isinstance(keys, str) else {**dump[section], **keys}
    return LaunchConfig.model_validate(dump)


def _different_names(file: str, configs: Sequence[LaunchConfig]) -> None:
    names = [config.name for config in configs]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(file, "name", name, "two configs have this name; their runs would share a folder")
