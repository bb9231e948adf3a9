"""Whether the files that a launch config names are there: looked at before any process starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megatron_overlap.config.checks import Problem
from megatron_overlap.config.megatron_args import data_prefix
from megatron_overlap.config.schema import LaunchConfig


def missing_inputs(cfg: LaunchConfig) -> Iterator[Problem]:
    """Every named input that cannot be read, with what makes it."""
    data, launch, train = cfg.data, cfg.launch, cfg.train
    if launch.entry is not None and not Path(launch.entry).is_file():
        yield Problem("launch.entry", launch.entry, "no such file; give a training script, or null")
    if data.path is not None:
        prefix = data_prefix(data.kind, data.path)
        for ending in (".bin", ".idx"):
            if not Path(prefix + ending).is_file():
                maker = " --stdlib" if "stdlib" in data.path else ""
                yield Problem(
                    "data.path",
                    data.path,
                    f"no file {prefix}{ending}; make it with scripts/prepare_data.py{maker}",
                )
    if data.tokenizer is not None and not Path(data.tokenizer).is_file():
        yield Problem("data.tokenizer", data.tokenizer, "no such file; give a tokenizer.json, or null")
    if train.load is not None and not Path(train.load).is_dir():
        yield Problem("train.load", train.load, "no such folder; give a folder of checkpoints, or null")
