"""Builds a GPT or LLaMA of given sizes with Megatron-Core alone, without Megatron's training arguments."""

from __future__ import annotations

from typing import Any

import torch


def build_gpt(
    *,
    ranks: int,
    sp: bool,
    dtype: torch.dtype,
    vocabulary: int,
    max_tokens: int,
    te: bool = False,
    llama: bool = False,
    **sizes: Any,
) -> Any:
    """A model in evaluation mode, with the same weights on every call.

    Args:
        ranks: tensor-parallel size.
        sp: sequence parallelism.
        dtype: of weights and activations.
        vocabulary: number of tokens.
        max_tokens: most tokens of a sequence.
        te: TransformerEngine layers.
        llama: RMSNorm, SwiGLU and a group of queries per rank.
        sizes: further fields of `TransformerConfig`; `num_layers`, `hidden_size` and `num_attention_heads` are needed.
    """
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    if llama:
        activation = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
        sizes = {"normalization": "RMSNorm", "num_query_groups": ranks, "add_bias_linear": False, **activation, **sizes}
    config = TransformerConfig(
        **{"ffn_hidden_size": 4 * sizes["hidden_size"], **sizes},
        tensor_model_parallel_size=ranks,
        sequence_parallel=sp,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_backend=AttnBackend.unfused if te else AttnBackend.local,
    )
    norm = {"normalization": "RMSNorm"} if llama else {}
    layers = get_gpt_layer_with_transformer_engine_spec() if te else get_gpt_layer_local_spec(**norm)
    torch.manual_seed(11)
    model = GPTModel(
        config=config,
        transformer_layer_spec=layers,
        vocab_size=vocabulary,
        max_sequence_length=max_tokens,
        parallel_output=True,
        position_embedding_type="rope",
    )
    return model.to(dtype).eval()
