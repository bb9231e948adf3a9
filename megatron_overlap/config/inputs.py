"""Whether the files that a launch config names are there: looked at before any process starts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from megatron_overlap.config.launch import LaunchConfig
from megatron_overlap.config.megatron_args import data_prefix
from megatron_overlap.config.validation import Problem

DESCRIPTION = "data.json"
"""What scripts/prepare_data.py writes about a data folder."""


def missing_inputs(cfg: LaunchConfig) -> Iterator[Problem]:
    """Every named input that cannot be used, with what makes it."""
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
    if data.kind == "text":
        yield from _vocabulary(cfg, Path(data.path))


def _vocabulary(cfg: LaunchConfig, folder: Path) -> Iterator[Problem]:
    """An id beyond the embedding is an index error in the middle of a step, or on a GPU worse."""
    try:
        size = int(json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        remedy = f"no readable {DESCRIPTION} in it; make it again with scripts/prepare_data.py --output {folder}"
        yield Problem("data.path", str(folder), remedy)
        return
    if size > cfg.model.vocab_size:
        remedy = f"the data has ids up to {size - 1}; use a vocab_size of at least {size}"
        yield Problem("model.vocab_size", cfg.model.vocab_size, remedy)
