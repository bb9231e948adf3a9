"""Model FLOPs against Megatron's own count, and by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.compare import model_flops


def config(model: dict[str, Any], **train: Any) -> LaunchConfig:
    tensor = train.pop("tensor", 1)
    args = train.pop("megatron_args", ())
    return LaunchConfig.model_validate(
        {
            "name": "x",
            "model": model,
            "parallel": {"tensor": tensor},
            "train": {"seq_length": 512, "global_batch_size": 4, "iterations": 5, **train},
            "megatron_args": args,
        }
    )


def megatron_flops(cfg: LaunchConfig, padded_vocab: int) -> float:
    """Megatron's count for the same model, by its own function."""
    from megatron.training.training import num_floating_point_operations

    model = cfg.model
    unused = dict.fromkeys(
        [
            "num_experts",
            "mtp_num_layers",
            "moe_ffn_hidden_size",
            "moe_latent_size",
            "moe_shared_expert_intermediate_size",
            "experimental_attention_variant",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        ]
    )
    args = SimpleNamespace(
        **unused,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        group_query_attention=model.num_query_groups != model.num_attention_heads,
        kv_channels=model.head_size,
        swiglu=model.swiglu,
        multi_latent_attention=False,
        attention_output_gate=False,
        is_hybrid_model=False,
        seq_length=cfg.train.seq_length,
        padded_vocab_size=padded_vocab,
    )
    return float(num_floating_point_operations(args, cfg.train.global_batch_size))


@pytest.mark.parametrize(
    ("model", "tensor", "padded"),
    [
        ({"preset": "gpt_tiny"}, 1, 4096),
        ({"preset": "llama_tiny"}, 2, 4096),
        ({"preset": "gpt3_125m"}, 4, 50688),
        ({"preset": "llama2_70b"}, 8, 32768),
        ({"preset": "llama3_8b"}, 1, 128256),
        ({"preset": "llama_tiny", "kv_channels": 64}, 1, 4096),
    ],
)
def test_as_megatron_counts(model: dict[str, Any], tensor: int, padded: int) -> None:
    cfg = config(model, tensor=tensor)
    assert model_flops.padded_vocab_size(cfg.model.vocab_size, tensor) == padded
    assert model_flops.step_flops(cfg) == pytest.approx(megatron_flops(cfg, padded), rel=1e-12)


def test_llama3_8b_by_hand() -> None:
    token = model_flops.token_flops(config({"preset": "llama3_8b"}).model, 8192, 128256)
    # 32 layers; 32 query heads and 8 key/value heads of 128; 3 GEMMs of 4096 x 14336.
    assert token.projections == 6 * 32 * 4096 * (4096 + 1024 + 1024 + 4096)
    assert token.attention == 6 * 32 * 2 * 4096 * 4096
    assert token.mlp == 6 * 32 * 3 * 4096 * 14336
    assert token.logits == 6 * 4096 * 128256
    assert token.total == pytest.approx(5.147e10, rel=1e-3)
    full = model_flops.token_flops(config({"preset": "llama3_8b"}).model, 8192, 128256, attention="full")
    assert full.attention == 2 * token.attention
    assert full.mlp == token.mlp


def test_tokens_and_batch() -> None:
    cfg = config({"preset": "gpt_tiny"})
    assert model_flops.tokens_per_step(cfg) == 2048
    assert model_flops.step_flops(config({"preset": "gpt_tiny"}, global_batch_size=8)) == 2 * model_flops.step_flops(
        cfg
    )


@pytest.mark.parametrize("args", [["--make-vocab-size-divisible-by", "1"], ["--make-vocab-size-divisible-by=1"]])
def test_another_padding_is_read(args: list[str]) -> None:
    cfg = config({"preset": "gpt_tiny"}, megatron_args=args)
    assert model_flops.step_flops(cfg) == pytest.approx(megatron_flops(cfg, 4000), rel=1e-12)


@pytest.mark.parametrize("arg", ["--num-experts=8", "--multi-latent-attention", "--hybrid-override-pattern=M*"])
def test_another_model_is_not_guessed(arg: str) -> None:
    with pytest.raises(model_flops.UnknownFlopsError, match=arg.partition("=")[0]):
        model_flops.step_flops(config({"preset": "gpt_tiny"}, megatron_args=[arg]))
