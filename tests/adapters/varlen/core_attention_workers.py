"""What a worker runs: Megatron's own arguments, embedding and data files, with no training around them.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from megatron_overlap.config import LaunchConfig, to_megatron_args


def start() -> None:
    if "megatron.core" not in sys.modules:
        from megatron_overlap.adapters import cpu

        cpu.install()


def refusals(group: dist.ProcessGroup, cfg: LaunchConfig, changes: Sequence[Sequence[str]], method: str) -> list[str]:
    """What is said of Megatron's arguments of a launch, each time with further ones."""
    start()
    from megatron.training.arguments import parse_args

    from megatron_overlap.adapters.varlen.arguments import refuse
    from megatron_overlap.adapters.varlen.core_attention import VarlenError

    texts = []
    for flags in changes:
        sys.argv = ["pretrain", *to_megatron_args(cfg), *flags]
        args = parse_args()
        try:
            refuse(args, method)
        except VarlenError as error:
            texts.append(str(error))
        else:
            texts.append("")
    return texts


def core_refusals(group: dist.ProcessGroup) -> list[str]:
    """What is said of layers and calls that the core attention does not do."""
    start()
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_overlap.adapters.varlen.core_attention import BalancedCoreAttention, TokenRotary, VarlenError

    def config(dropout: float) -> TransformerConfig:
        return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, attention_dropout=dropout)

    x = torch.zeros(1, 1, 2, 4)
    packed = PackedSeqParams(qkv_format="thd")
    causal = AttnMaskType.causal
    texts = []
    for call in (
        lambda: BalancedCoreAttention(config(0.1), 1, causal, "self"),
        lambda: BalancedCoreAttention(config(0.0), 1, AttnMaskType.padding, "self"),
        lambda: BalancedCoreAttention(config(0.0), 1, causal, "cross"),
        lambda: BalancedCoreAttention(config(0.0), 1, causal, "self")(x, x, x, None),
        lambda: BalancedCoreAttention(config(0.0), 1, causal, "self")(x, x, x, None, packed_seq_params=packed),
        lambda: TokenRotary(torch.nn.Identity(), 4).get_rotary_seq_len(None, None, x, None, packed),
    ):
        try:
            call()
        except VarlenError as error:
            texts.append(str(error))
    return texts


def documents(group: dist.ProcessGroup, folder: Path, max_rows: int) -> list[list[list[int]]]:
    """Every document of a pair that has documents of several sequences, an empty one, and long ones."""
    start()
    from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

    from megatron_overlap.adapters.varlen.dataset import IndexedDocuments

    builder = IndexedDatasetBuilder(str(folder / "x.bin"), dtype=np.uint16)
    for ids, lengths in (([1, 2, 3], [3]), ([9], [1]), ([4, 5, 6, 7, 8], [2, 3]), (list(range(10, 17)), [7])):
        builder.add_document(torch.tensor(ids), lengths)
    builder.finalize(str(folder / "x.idx"))
    data = IndexedDataset(str(folder / "x"))
    whole = IndexedDocuments(data, 0, 4, max_rows)
    last = IndexedDocuments(data, 3, 4, max_rows)
    assert [last.read(n).tolist() for n in range(len(last))] == [
        whole.read(n).tolist() for n in range(len(whole) - len(last), len(whole))
    ]
    assert [whole.rows(n) for n in range(len(whole))] == [len(whole.read(n)) for n in range(len(whole))]
    return [whole.read(n).tolist() for n in range(len(whole))]


def small_things(group: dist.ProcessGroup) -> tuple[list[int], list[list[int]]]:
    """Nodes by hosts, and parts by weights."""
    start()
    from megatron_overlap.adapters.varlen.core_attention import nodes_of
    from megatron_overlap.adapters.varlen.dataset import split_bounds

    hosts = ([5], [5, 5, 5, 5], [5, 5, 7, 7], [5, 5, 7], [5, 7, 5, 7], [1, 2, 3])
    return [nodes_of(ids) for ids in hosts], [split_bounds(text, 200) for text in ("100,0,0", "969,30,1", "1,1")]
