"""Worker functions: Megatron's arguments, rotary embedding and data files, without a training.

The functions import Megatron, so that only worker processes import it, after the CPU adapter.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.config import LaunchConfig, to_megatron_args
from megatron_overlap.schedules.varlen import CostModel
from tests.adapters.tensor_parallel.linear_workers import TENSOR
from tests.adapters.tensor_parallel.transformer_engine_models import (
    POSITIONS,
    VOCABULARY,
    Model,
    assert_near_stock,
    calls_of,
    make_model,
)
from tests.adapters.ulysses.core_attention_workers import gradients, megatron_groups
from tests.helpers.collectives import device_copies


def start() -> None:
    if "megatron.core" not in sys.modules:
        from megatron_overlap.adapters import cpu

        cpu.install()


def argument_errors(
    group: dist.ProcessGroup, cfg: LaunchConfig, flag_lists: Sequence[Sequence[str]], method: str
) -> list[str]:
    """The error message for the arguments of a launch with each list of further flags; empty if there is none."""
    start()
    from megatron.training import arguments

    from megatron_overlap.adapters.varlen.core_attention import VarlenError
    from scripts.pretrain_varlen import check_arguments

    # `parse_args` makes a parser in 0.15 s for each list.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    messages = []
    for flags in flag_lists:
        sys.argv = ["pretrain", *to_megatron_args(cfg), *flags]
        with patch.object(arguments, "add_megatron_arguments", lambda new: parser):
            args = arguments.parse_args()
        try:
            check_arguments(args, method)
        except VarlenError as error:
            messages.append(str(error))
        else:
            messages.append("")
    return messages


def script_errors(group: dist.ProcessGroup, given: Sequence[dict[str, object]]) -> list[str]:
    """The error of the provided scripts for each of some arguments without `overlap.varlen`."""
    start()
    from megatron.training import global_vars

    from scripts.pretrain_decoder import build_model

    messages = []
    for arguments in given:
        global_vars._GLOBAL_ARGS = argparse.Namespace(**{"dataloader_type": None, "spec": None, **arguments})
        try:
            build_model()
        except ValueError as error:
            messages.append(str(error))
        finally:
            global_vars._GLOBAL_ARGS = None
    return messages


def core_attention_errors(group: dist.ProcessGroup) -> list[str]:
    """Error messages of calls that the core attention does not support."""
    start()
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_overlap.adapters.varlen.core_attention import BalancedCoreAttention, TokenRotary, VarlenError

    attention = BalancedCoreAttention(TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2))
    x = torch.zeros(1, 1, 2, 4)
    packed = PackedSeqParams(qkv_format="thd")
    messages = []
    for call in (
        lambda: attention(x, x, x, None),
        lambda: attention(x, x, x, None, packed_seq_params=packed),
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

    from scripts.pretrain_documents import IndexedDocuments

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


def empty_split(group: dist.ProcessGroup, folder: Path) -> str:
    """The error of a run that evaluates on a split without documents; the pair is that of `read_documents`."""
    start()
    from megatron_overlap.adapters.varlen.core_attention import VarlenError
    from scripts.pretrain_documents import document_loaders

    read_documents(group, folder, 4)
    read = {"skip_train": True, "eval_iters": 1, "consumed_train_samples": 0, "consumed_valid_samples": 0}
    pair = {"data_path": [str(folder / "x")], "mmap_bin_files": True, "split": "100,0,0", "seq_length": 4}
    try:
        document_loaders(None, SimpleNamespace(**pair, **read))  # type: ignore[arg-type]
    except VarlenError as error:
        return str(error)
    return ""


def nodes_and_splits(group: dist.ProcessGroup) -> tuple[list[int], list[list[int]]]:
    """Nodes by hosts, and bounds of the splits by weights."""
    start()
    from megatron_overlap.adapters.varlen.core_attention import nodes_of
    from scripts.pretrain_documents import split_bounds

    hosts = ([5], [5, 5, 5, 5], [5, 5, 7, 7], [5, 5, 7], [5, 7, 5, 7], [1, 2, 3])
    return [nodes_of(ids) for ids in hosts], [split_bounds(weights, 200) for weights in ("100,0,0", "969,30,1", "1,1")]


TOKENS = 40


class _Documents:
    """Documents of random ids; the micro-batch that they fill has long and short ones."""

    lengths = (25, 3, 9, 3)

    def __len__(self) -> int:
        return len(self.lengths)

    def rows(self, index: int) -> int:
        return self.lengths[index]

    def read(self, index: int) -> np.ndarray:
        ids = np.random.default_rng(index).integers(0, VOCABULARY, self.lengths[index] + 1)
        return np.stack([ids[:-1], ids[1:], np.ones(self.lengths[index])], axis=1).astype(np.int32)


def _run_documents(
    case: Model,
    tensor: int,
    context: int,
    overlap: dict[str, Any],
    state: dict[str, torch.Tensor] | None = None,
    *,
    copies: bool = False,
) -> tuple[dict[str, torch.Tensor], Any, dict[str, torch.Tensor]]:
    """Mean loss and every gradient of one micro-batch; the report; the parameters, which are `state` where given.

    `copies`: attention communicates by copies in host memory, through no ring.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    from megatron_overlap.adapters.varlen.core_attention import VarlenAdapter
    from megatron_overlap.adapters.varlen.loader import DocumentLoader
    from scripts import pretrain_varlen as training
    from scripts.pretrain_decoder import layer_specification

    with megatron_groups(tensor, context), enable(OverlapConfig.model_validate(overlap), strict=True) as session:
        group = parallel_state.get_context_parallel_group()
        if copies:
            transport = device_copies(HostGroup(group))
            session.transports.insert(group, transport, "copies")
        adapter = session.adapter(VarlenAdapter, lambda session: VarlenAdapter(session, group, CostModel(), TOKENS))

        def build(config: Any) -> Any:
            layer = layer_specification(config, use_te=True)
            training.set_core_attention(layer, adapter)
            model = GPTModel(config, layer, VOCABULARY, POSITIONS, position_embedding_type="rope")
            training.rotate_by_position(model, SimpleNamespace(position_embedding_type="rope", seq_length=TOKENS))
            return model

        config = {"context_parallel_size": context, "sequence_parallel": tensor > 1}
        tensor_group = parallel_state.get_tensor_model_parallel_group()
        model = make_model(tensor_group, replace(case, config=config), case.dtype, build)
        if state is not None:
            model.load_state_dict(state, strict=False)
        loader = DocumentLoader(
            _Documents(), adapter.loader_thread, adapter.plan, tokens=TOKENS, seed=3, row_multiple=tensor
        )
        losses, mask = training.forward(next(loader), model, adapter)
        total = (losses.float() * mask).sum()
        num_tokens = mask.sum()
        dist.all_reduce(num_tokens, group=group)
        loss = total / num_tokens
        loss.backward()
        dist.barrier(group)
        if copies:
            received = {name for name in transport.buffer_pool.sizes() if name.endswith("received")}
            assert received == {
                f"balanced_attention {each} received"
                for each in ("forward intra-node payload", "backward intra-node payload", "backward intra-node result")
            }
        return gradients(model, loss), session.report(), model.state_dict()


def te_model_against_stock(
    group: dist.ProcessGroup, tensor: int, dtype: torch.dtype, *, copies: bool
) -> tuple[dict[str, int], list[str]]:
    """A model of TransformerEngine layers on two context ranks, equal to one rank with stock attention and a mask."""
    case, masked = Model("llama", dtype), {"tensor": {"method": "none"}, "varlen": {"method": "masked"}}
    stock, _, state = _run_documents(case, tensor, 1, masked)
    exact, _, _ = _run_documents(replace(case, dtype=torch.float32), tensor, 1, masked, state)
    overlap = {"tensor": TENSOR, "varlen": {"method": "balanced"}}
    mine, report, _ = _run_documents(case, tensor, 2, overlap, copies=copies)
    assert_near_stock(mine, stock, exact, dtype)
    return calls_of(report)
