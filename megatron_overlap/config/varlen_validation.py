"""What balanced attention cannot be combined with, as far as a launch config tells.

`adapters/varlen/arguments.py` looks at Megatron's arguments for the same and for what no key says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from megatron_overlap.config.megatron_args import flags_in
from megatron_overlap.config.problems import Problem

if TYPE_CHECKING:
    from megatron_overlap.config.launch import LaunchConfig

# Flags with no key of their own, and what they would need.
REFUSED_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--mtp-num-layers": "multi-token prediction needs the next rows, which other ranks hold",
        "--num-experts": "a mixture of experts weighs its auxiliary loss by the rows of one rank",
        "--hybrid-layer-pattern": "Mamba layers need a rank's rows in the order of the text",
        "--hybrid-override-pattern": "Mamba layers need a rank's rows in the order of the text",
        "--cuda-graph-impl": "CUDA graphs need the same shapes in every step",
        "--enable-cuda-graph": "CUDA graphs need the same shapes in every step",
        "--external-cuda-graph": "CUDA graphs need the same shapes in every step",
        "--window-size": "the plan balances full causal attention",
        "--multi-latent-attention": "its keys and values have a shape of their own",
        "--reset-position-ids": "positions start again with every document already",
        "--reset-attention-mask": "documents are kept apart already",
        "--dataloader-type": "documents come from a loader of the plugin",
        "--hybrid-context-parallel": "it is another way to the same end",
        "--sft": "it packs sequences by itself",
        "--spec": "the layers are built with an attention of the plugin",
    }
)


def varlen_problems(cfg: LaunchConfig) -> Iterator[Problem]:
    """All that cannot run with `overlap.varlen`; nothing where it is off."""
    varlen, parallel, train, overlap = cfg.overlap.varlen, cfg.parallel, cfg.train, cfg.overlap
    if varlen.method == "none":
        return
    if parallel.pipeline > 1:
        yield Problem("parallel.pipeline", parallel.pipeline, "use 1 with overlap.varlen: stages would need the plan")
    if varlen.method == "masked" and parallel.context > 1:
        yield Problem(
            "parallel.context",
            parallel.context,
            "use 1 with overlap.varlen.method masked: Megatron's own attention has no context parallelism",
        )
    if overlap.ulysses.method != "none":
        yield Problem("overlap.ulysses.method", overlap.ulysses.method, "use none with overlap.varlen")
    if overlap.tensor.attention != "row":
        yield Problem("overlap.tensor.attention", overlap.tensor.attention, "use row with overlap.varlen")
    if cfg.model.attention_dropout > 0:
        yield Problem("model.attention_dropout", cfg.model.attention_dropout, "use 0 with overlap.varlen")
    if train.micro_batch_size > 1:
        yield Problem(
            "train.micro_batch_size",
            train.micro_batch_size,
            "use 1 with overlap.varlen: a micro-batch is one row of whole documents, train.seq_length tokens at most",
        )
    if train.transformer_impl != "local":
        yield Problem("train.transformer_impl", train.transformer_impl, "use local with overlap.varlen")
    if cfg.data.kind == "mock":
        yield Problem("data.kind", "mock", "overlap.varlen reads documents; use text or indexed")
    if cfg.launch.entry is not None:
        yield Problem(
            "launch.entry", cfg.launch.entry, "use null with overlap.varlen: the provided scripts read documents"
        )
    share = -(-train.seq_length // parallel.context)
    if varlen.capacity != "auto" and varlen.capacity < share:
        yield Problem(
            "overlap.varlen.capacity",
            varlen.capacity,
            f"must be at least train.seq_length / parallel.context = {share}, or auto",
        )
    if varlen.nodes != "auto" and parallel.context % varlen.nodes:
        yield Problem("overlap.varlen.nodes", varlen.nodes, f"must divide parallel.context {parallel.context}, or auto")
    for index, flag in flags_in(cfg.megatron_args):
        if flag in REFUSED_FLAGS:
            yield Problem(
                f"megatron_args.{index}",
                cfg.megatron_args[index],
                f"not with overlap.varlen: {REFUSED_FLAGS[flag]}; remove it",
            )
