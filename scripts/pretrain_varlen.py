"""Functions of the provided training scripts for training on whole documents.

`check_arguments` refuses arguments of Megatron that balanced attention does not support, before the model is built.
`config/validation.py` checks launch configurations, before the processes start.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from megatron.core import mpu

from megatron_overlap.adapters.varlen.core_attention import (
    BalancedCoreAttention,
    MaskedCoreAttention,
    PackedRows,
    TokenRotary,
    VarlenAdapter,
    VarlenError,
)
from megatron_overlap.adapters.varlen.loader import Batch
from megatron_overlap.config.validation import REFUSED_FLAGS
from megatron_overlap.schedules.varlen import CostModel
from megatron_overlap.session import current

# Values of an argument that is not set.
_OFF: tuple[Any, ...] = (None, False, 0, (), [], "none", "")

# The default cost model describes 64 heads of size 128, and linear layers at 600 TFLOP/s.
_MEASURED_WIDTH = 64 * 128
_FS_PER_PARAMETER = 2 / 600e12 * 1e15


def varlen_adapter(args: Any) -> VarlenAdapter | None:
    """The adapter of the session; None if `overlap.varlen` is off. The first call creates it; all ranks must call.

    Raises:
        VarlenError: balanced attention does not support an argument, or the documents need `overlap.varlen`.
    """
    session = current()
    if session is None or session.switched_off or session.config.varlen.method == "none":
        if args.dataloader_type == "external":
            raise VarlenError("--dataloader-type: external: needs overlap.varlen and the plugin switched on")
        return None
    adapter = session.find(VarlenAdapter)
    if adapter is None:
        check_arguments(args, session.config.varlen.method)
        group, cost = mpu.get_context_parallel_group(), cost_of(args)
        adapter = session.adapter(VarlenAdapter, lambda session: VarlenAdapter(session, group, cost, args.seq_length))
    return adapter


def set_core_attention(layer: Any, adapter: VarlenAdapter) -> None:
    """Sets the core attention of a layer spec to that of the plugin."""
    core = MaskedCoreAttention if adapter.masked else BalancedCoreAttention
    layer.submodules.self_attention.submodules.core_attention = core


def rotate_by_position(model: Any, args: Any) -> None:
    """Makes the rotary embedding of a model use token positions. Learned positions already do."""
    if args.position_embedding_type == "rope":
        model.rotary_pos_emb = TokenRotary(model.rotary_pos_emb, args.seq_length)


def forward(batch: Batch, model: Any, adapter: VarlenAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of every row of a micro-batch, and its loss mask, `[1, T]` each."""
    device = torch.device(torch.cuda.current_device())
    names = ("tokens", "labels", "loss_mask", "position_ids", "documents")
    batch = replace(batch, **{name: getattr(batch, name).to(device) for name in names})
    output: torch.Tensor = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=PackedRows(batch=batch, adapter=adapter),
    )
    return output, batch.loss_mask


def cost_of(args: Any) -> CostModel:
    """The default cost model, scaled to the layers of this model on one tensor-parallel rank."""
    ranks, default = args.tensor_model_parallel_size, CostModel()
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    width, kv_width = args.kv_channels * args.num_attention_heads, args.kv_channels * groups
    mlp = (3 if args.swiglu else 2) * args.hidden_size * args.ffn_hidden_size
    parameters = 2 * args.hidden_size * (width + kv_width) + mlp
    num_bytes = 2 if args.bf16 or args.fp16 else 4

    def part(of_64_heads: int) -> int:
        return max(1, of_64_heads * width // _MEASURED_WIDTH // ranks)

    return CostModel(
        pair_fs=part(default.pair_fs),
        token_fs=part(default.token_fs),
        floor_fs=default.floor_fs,
        linear_fs=round(parameters * _FS_PER_PARAMETER / ranks),
        kv_bytes=2 * kv_width * num_bytes // ranks,
    )


def check_arguments(args: Any, method: str) -> None:
    """Refuses the first argument that `overlap.varlen` does not support.

    Args:
        args: Megatron's arguments.
        method: `overlap.varlen.method`.

    Raises:
        VarlenError: names the flag, its value, and the reason or remedy.
    """
    for flag, value, reason in _argument_problems(args, method):
        raise VarlenError(f"{flag}: {value}: not with overlap.varlen: {reason}")


def _argument_problems(args: Any, method: str) -> Iterator[tuple[str, Any, str]]:
    for flag, reason in REFUSED_FLAGS.items():
        value = getattr(args, flag.removeprefix("--").removesuffix("-format").replace("-", "_"), None)
        if flag == "--dataloader-type":
            if value != "external":
                yield flag, value, "the plugin loads the documents: use external"
        elif value not in _OFF:
            yield flag, value, f"{reason}; leave it out"
    required: tuple[tuple[str, Any, str], ...] = (
        ("--pipeline-model-parallel-size", 1, "pipeline stages do not pass the plan on: use 1"),
        ("--micro-batch-size", 1, "a micro-batch is one row of whole documents, --seq-length tokens at most: use 1"),
        ("--eval-micro-batch-size", 1, "a micro-batch is one row of whole documents, also in evaluations: use 1"),
        ("--calculate-per-token-loss", True, "ranks hold different numbers of tokens: add it"),
        ("--attention-dropout", 0.0, "use 0"),
    )
    for flag, value, reason in required:
        found = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if found not in (None, value):
            yield flag, found, reason
    if args.position_embedding_type not in ("rope", "learned_absolute"):
        yield "--position-embedding-type", args.position_embedding_type, "use rope or learned_absolute"
    if method == "masked" and args.context_parallel_size > 1:
        yield (
            "--context-parallel-size",
            args.context_parallel_size,
            "method masked uses stock attention, which has no context parallelism: use 1",
        )
    if args.mock_data:
        yield "--mock-data", True, "it reads documents: use --data-path"
    if len(args.data_path or ()) != 1:
        yield "--data-path", args.data_path, "give the prefix of one .bin/.idx pair"
    for name, off in (("softmax_type", "vanilla"), ("experimental_attention_variant", None)):
        found = getattr(args, name, off)
        if found != off:
            yield f"--{name.replace('_', '-')}", found, "balanced attention does not support it; leave it out"
