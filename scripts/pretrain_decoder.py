"""Pretraining of a decoder-only model on Megatron's training loop, for the provided scripts.

Holds the model provider, dataset provider and forward step, which the Megatron-Core wheel lacks. Uses only interfaces
that Megatron-Core 0.16 to 0.19 share.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import mpu, tensor_parallel
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import arguments, get_args, get_tokenizer, pretrain
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage

from megatron_overlap.adapters.training import bootstrap

sys.path.insert(0, str(Path(__file__).parent))  # `runpy.run_path` does not add it
import pretrain_varlen as training
from pretrain_documents import document_loaders

_INTEGER_KEYS = ("tokens", "labels", "position_ids")
_FLOAT_KEYS = ("loss_mask",)
# Fields of the configuration that are arguments of the layer specifications, for TransformerEngine and local layers.
_LAYER_OPTIONS = (
    "qk_layernorm",
    "multi_latent_attention",
    "qk_l2_norm",
    "use_kitchen",
    "use_kitchen_attention",
    "kitchen_attention_backend",
)
# Arguments that change the data or the model, and that only Megatron-LM's scripts read.
_UNSUPPORTED = (
    *("spec", "experimental_attention_variant", "heterogeneous_layers_config_path", "hybrid_context_parallel"),
    *("sft", "fim_data", "dataloader_inter_document_masking", "logits_load_dir"),
)
_TE_LAYER_OPTIONS = ("use_te_activation_func", "mla_down_proj_fusion", "use_grouped_gemm_for_dense_mlp")


def pretrain_decoder(architecture_flags: Sequence[str] = ()) -> None:
    """Trains until `--train-iters` with the arguments of the command line.

    Args:
        architecture_flags: Megatron flags of the script's architecture, added where the command line lacks them.
    """
    sys.argv[1:] = [*sys.argv[1:], *missing_flags(architecture_flags, sys.argv[1:])]
    bootstrap.use_compiled_helpers()
    datasets = functools.partial(build_datasets)
    # Megatron then calls the provider on all ranks, as its collectives need.
    datasets.is_distributed = True
    call: dict[str, Any] = {
        "train_valid_test_dataset_provider": datasets,
        "model_provider": build_model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" in inspect.signature(pretrain).parameters:
        from megatron.training.argument_utils import pretrain_cfg_container_from_args

        args = arguments.parse_and_validate_args()
        call["cfg_container"] = pretrain_cfg_container_from_args(args)
    pretrain(**call)


def missing_flags(flags: Sequence[str], argv: Sequence[str]) -> list[str]:
    """The flags, with their values, that `argv` does not set."""
    given = {argument.partition("=")[0] for argument in argv}
    missing: list[str] = []
    keep = False
    for flag in flags:
        keep = flag not in given if flag.startswith("--") else keep
        if keep:
            missing.append(flag)
    return missing


def build_model(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    **groups: Any,
) -> GPTModel:
    """The model, or this pipeline stage's part of it.

    Raises:
        ValueError: a flag is given that the provided scripts do not support, such as `--spec`.
    """
    args = get_args()
    documents = training.varlen_adapter(args)
    if given := [f"--{name.replace('_', '-')}" for name in _UNSUPPORTED if getattr(args, name, None)]:
        raise ValueError(
            f"the provided scripts do not support {', '.join(given)}: "
            "run Megatron-LM's pretrain_gpt.py with the plugin (python -m megatron_overlap pretrain_gpt.py ...)"
        )
    config = core_transformer_config_from_args(args) if config is None else config
    use_te = args.transformer_impl == "transformer_engine"
    layer = layer_specification(config, use_te, vp_stage)
    if args.mtp_num_layers:
        groups["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, layer, use_transformer_engine=use_te, vp_stage=vp_stage
        )
    if documents is not None:
        training.set_core_attention(layer, documents)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        vp_stage=vp_stage,
        **{name: group for name, group in groups.items() if group is not None},
    )
    if documents is not None:
        training.rotate_by_position(model, args)
    return model


def layer_specification(config: Any, use_te: bool, vp_stage: int | None = None) -> Any:
    """What Megatron-LM's scripts build layers of, for a decoder without `--spec`."""
    if config.num_moe_experts:
        return get_gpt_decoder_block_spec(
            config,
            use_transformer_engine=use_te,
            normalization=config.normalization,
            qk_l2_norm=config.qk_l2_norm,
            vp_stage=vp_stage,
        )
    # Releases have different arguments: only those that the configuration sets are given.
    names = {name: name for name in (*_LAYER_OPTIONS, *(_TE_LAYER_OPTIONS if use_te else ("normalization",)))}
    names |= {"use_te_op_fuser": "use_transformer_engine_op_fuser"} if use_te else {}
    options = {name: value for name, field in names.items() if (value := getattr(config, field, None))}
    return (get_gpt_layer_with_transformer_engine_spec if use_te else get_gpt_layer_local_spec)(**options)


def build_datasets(num_samples: Sequence[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Train, validation and test sets, on the ranks that read data: tensor rank 0 of the first and last stages."""
    args = get_args()
    documents = training.varlen_adapter(args)
    if documents is not None:
        train, valid, test = document_loaders(documents, args)
        return train, valid, test
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        # Attention is causal without a mask tensor; only separated documents need one.
        create_attention_mask=args.reset_attention_mask,
    )

    def reads_data() -> bool:
        return bool(mpu.get_tensor_model_parallel_rank() == 0 and is_first_or_last_pipeline_stage(vp_stage))

    kind = MockGPTDataset if args.mock_data else GPTDataset
    train, valid, test = BlendedMegatronDatasetBuilder(kind, list(num_samples), reads_data, config).build()
    return train, valid, test


def next_batch(data: Iterator[dict[str, torch.Tensor]] | None) -> dict[str, torch.Tensor | None]:
    """The micro-batch on every rank of the tensor group; only tensor rank 0 has ``data``."""
    args = get_args()
    rows = next(data) if mpu.get_tensor_model_parallel_rank() == 0 and data is not None else None
    batch: dict[str, torch.Tensor | None] = {"attention_mask": None}
    batch.update(tensor_parallel.broadcast_data(list(_INTEGER_KEYS), rows, torch.int64))
    batch.update(tensor_parallel.broadcast_data(list(_FLOAT_KEYS), rows, torch.float32))
    if args.reset_attention_mask:
        batch.update(tensor_parallel.broadcast_data(["attention_mask"], rows, torch.bool))
    group = mpu.get_context_parallel_group()
    if group.size() > 1:
        # The mask is not cut: attention over context ranks is causal and refuses --reset-attention-mask.
        for name in (*_INTEGER_KEYS, *_FLOAT_KEYS):
            batch[name] = positions_of_rank(batch[name], group.rank(), group.size())
    return batch


def positions_of_rank(rows: Any, rank: int, size: int) -> torch.Tensor:
    """The positions of `rows [B, S]` on context rank `rank` of `size`.

    Of `2 * size` equal pieces these are `rank` and `2 * size - 1 - rank`, as Megatron's rotary embedding expects.
    """
    pieces = rows.chunk(2 * size, dim=1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]], dim=1)


def forward_step(
    data: Iterator[Any] | None, model: Any, return_schedule_plan: bool = False
) -> tuple[Any, Callable[..., Any]]:
    """Loss of every token of the next micro-batch, and the function that sums the losses.

    With `return_schedule_plan` the plan of the forward pass takes the place of the loss, for
    `--overlap-moe-expert-parallel-comm`.
    """
    documents = training.varlen_adapter(get_args())
    if documents is not None:
        assert data is not None
        losses, loss_mask = training.forward(next(data), model, documents)
        return losses, functools.partial(sum_loss, loss_mask)
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    if is_first_or_last_pipeline_stage(vp_stage):
        batch = next_batch(data)
    else:
        batch = dict.fromkeys((*_INTEGER_KEYS, *_FLOAT_KEYS, "attention_mask"))
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )
    return output, functools.partial(sum_loss, batch["loss_mask"])


def sum_loss(loss_mask: Any, token_losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Sum of the unmasked losses, the number of unmasked tokens, and both for the log.

    Megatron's schedule scales the loss by the size of the context group if only two values are returned.

    Raises:
        FloatingPointError: the loss is not finite and ``--check-for-nan-in-loss-and-grad`` is on.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(token_losses.reshape(-1).float() * mask)
    num_tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad and not torch.isfinite(loss):
        raise FloatingPointError(f"loss is {loss.item()} before reduction over the data parallel ranks")
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}
