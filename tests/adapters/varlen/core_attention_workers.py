"""Worker functions: Megatron's arguments, rotary embedding and data files, without a training.

The functions import Megatron, so that only worker processes import it, after the CPU adapter.
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


def argument_errors(
    group: dist.ProcessGroup, cfg: LaunchConfig, flag_lists: Sequence[Sequence[str]], method: str
) -> list[str]:
    """The error message for the arguments of a launch with each list of further flags; empty if there is none."""
    start()
    from megatron.training.arguments import parse_args

    from megatron_overlap.adapters.varlen.core_attention import VarlenError
    from megatron_overlap.adapters.varlen.training import check_arguments

    messages = []
    for flags in flag_lists:
        sys.argv = ["pretrain", *to_megatron_args(cfg), *flags]
        args = parse_args()
        try:
            check_arguments(args, method)
        except VarlenError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def core_attention_errors(group: dist.ProcessGroup) -> list[str]:
    """Error messages of layers and calls that the core attention does not support."""
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
    messages = []
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
            messages.append(str(error))
    return messages


def read_documents(group: dist.ProcessGroup, folder: Path, max_rows: int) -> list[list[list[int]]]:
    """Every document of a pair with a document of several sequences, one without rows, and a long one."""
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


def nodes_and_splits(group: dist.ProcessGroup) -> tuple[list[int], list[list[int]]]:
    """Nodes by hosts, and bounds of the splits by weights."""
    start()
    from megatron_overlap.adapters.varlen.core_attention import nodes_of
    from megatron_overlap.adapters.varlen.dataset import split_bounds

    hosts = ([5], [5, 5, 5, 5], [5, 5, 7, 7], [5, 5, 7], [5, 7, 5, 7], [1, 2, 3])
    return [nodes_of(ids) for ids in hosts], [split_bounds(weights, 200) for weights in ("100,0,0", "969,30,1", "1,1")]
