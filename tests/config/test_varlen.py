"""What `overlap.varlen` does not go with is refused by its key, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.config import ConfigError, load_launch_config, to_megatron_args, without_overlap
from megatron_overlap.config.validation import REFUSED_FLAGS
from tests.config.samples import write

RIGHT = """\
name: sample
model: {preset: llama_tiny}
parallel: {context: 2}
train: {seq_length: 128, global_batch_size: 4, iterations: 5}
data: {kind: text, path: data}
overlap: {varlen: {method: balanced}}
launch: {device: cpu}
"""
TWO_STAGES = ("parallel.pipeline=2", "launch.ranks_per_node=4")
# Override(s), key, a part of the remedy.
REFUSED = {
    "pipeline": (TWO_STAGES, "parallel.pipeline", "use 1"),
    "ulysses": (("overlap.ulysses.method=p2p",), "overlap.ulysses.method", "use none"),
    "query split": (("overlap.tensor.attention=query_split",), "overlap.tensor.attention", "use row"),
    "dropout": (("model.attention_dropout=0.1",), "model.attention_dropout", "use 0"),
    "micro-batch": (("train.micro_batch_size=2",), "train.micro_batch_size", "use 1"),
    "mock data": (("data.kind=mock", "data.path="), "data.kind", "use text or indexed"),
    "script": (("launch.entry=x.py",), "launch.entry", "use null"),
    "mask": (("overlap.varlen.method=masked",), "parallel.context", "use 1"),
    "capacity": (("overlap.varlen.capacity=63",), "overlap.varlen.capacity", "= 64, or auto"),
    "nodes": (("overlap.varlen.nodes=3",), "overlap.varlen.nodes", "must divide parallel.context 2"),
    "method": (
        ("overlap.varlen.method=zigzag",),
        "overlap.varlen.method",
        "use balanced, ring, all_gather, masked or none",
    ),
    **{
        flag: ((f"megatron_args=[--foo, {flag}=1]",), "megatron_args.1", f"not with overlap.varlen: {reason}")
        for flag, reason in REFUSED_FLAGS.items()
    },
}


def test_it_is_right(tmp_path: Path) -> None:
    args = to_megatron_args(load_launch_config(write(tmp_path, RIGHT)))
    assert args.count("--dataloader-type=external") == args.count("--calculate-per-token-loss") == 1
    assert "--dataloader-type=external" not in to_megatron_args(load_launch_config(write(tmp_path)))


def test_a_flag_is_not_given_twice(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path, RIGHT), ["megatron_args=[--calculate-per-token-loss]"])
    assert to_megatron_args(cfg).count("--calculate-per-token-loss") == 1


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    overrides, key, remedy = REFUSED[case]
    with pytest.raises(ConfigError) as error:
        load_launch_config(write(tmp_path, RIGHT), overrides)
    assert error.value.key == key
    assert remedy in error.value.remedy


def test_without_overlap_documents_stay_and_are_cut_over_all_ranks(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path, RIGHT), ["overlap.varlen.nodes=2"])
    off = without_overlap(cfg)
    assert off.overlap.varlen == cfg.overlap.varlen.model_copy(update={"method": "ring"})
    assert to_megatron_args(off) == to_megatron_args(cfg)
    masked = load_launch_config(write(tmp_path, RIGHT), ["overlap.varlen.method=masked", "parallel.context=1"])
    assert without_overlap(masked).overlap.varlen.method == "masked"
