"""Model FLOPs against the count of Megatron and by hand; peak rates by device name and by measurement."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_overlap.config import LaunchConfig, load_launch_config
from megatron_overlap.config.overlap import VarlenOverlap
from megatron_overlap.tools.compare import flops
from tests.helpers.forked_python import ForkedPython

CONFIGS = Path(__file__).resolve().parents[3] / "configs/gpu"


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


def megatron_flops(cfg: LaunchConfig, padded_vocab: int, **experts: int) -> float:
    """The count of Megatron for the same model, from `num_floating_point_operations`."""
    from megatron.training.training import num_floating_point_operations

    model = cfg.model
    unused = dict.fromkeys(
        [
            "mtp_num_layers",
            "moe_latent_size",
            "experimental_attention_variant",
            "hybrid_layer_pattern",
            "hybrid_override_pattern",
        ]
    )
    args = SimpleNamespace(
        **unused,
        **{"num_experts": None, "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None, **experts},
        moe_layer_freq=1,
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
    assert flops.padded_vocab_size(cfg.model.vocab_size, tensor) == padded
    assert flops.step_flops(cfg) == pytest.approx(megatron_flops(cfg, padded), rel=1e-12)


@pytest.mark.parametrize(
    ("args", "experts"),
    [
        (["--num-experts=8"], {"num_experts": 8, "moe_router_topk": 2}),
        (
            [
                *("--num-experts", "16", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "96"),
                *("--moe-shared-expert-intermediate-size", "160"),
            ],
            {
                "num_experts": 16,
                "moe_router_topk": 4,
                "moe_ffn_hidden_size": 96,
                "moe_shared_expert_intermediate_size": 160,
            },
        ),
    ],
)
def test_active_experts_as_megatron_counts(args: list[str], experts: dict[str, int]) -> None:
    cfg = config({"preset": "llama_tiny"}, megatron_args=args)
    assert flops.step_flops(cfg) == pytest.approx(megatron_flops(cfg, 4096, **experts), rel=1e-12)


def test_mixtral_has_the_active_parameters_of_its_paper() -> None:
    """Mixtral of Experts (arXiv 2401.04088): 13B active parameters. The embedding look-up counts nothing."""
    cfg = load_launch_config(CONFIGS / "mixtral_8x7b_tp4_ep8/overlap.yaml")
    token = flops.token_flops(cfg.model, 4096, 32000, experts=flops.expert_shape(cfg))
    active = (sum(token.values()) - token["attention"]) / 6 + 32000 * 4096
    assert active == pytest.approx(12.9e9, rel=0.005)


def test_qwen3_has_the_active_parameters_of_its_report() -> None:
    """Qwen3 Technical Report (arXiv 2505.09388): 3.3B active parameters. Norms and routers count nothing."""
    cfg = load_launch_config(CONFIGS / "qwen3_30b_a3b_ep16/overlap.yaml")
    token = flops.token_flops(cfg.model, 4096, 151936, experts=flops.expert_shape(cfg))
    active = (sum(token.values()) - token["attention"]) / 6 + 151936 * 2048
    assert active == pytest.approx(3.34e9, rel=0.005)


def test_llama3_8b_by_hand() -> None:
    token = flops.token_flops(config({"preset": "llama3_8b"}).model, 8192, 128256)
    # 32 layers; 32 query heads and 8 key/value heads of 128; 3 GEMMs of 4096 x 14336.
    assert token["projections"] == 6 * 32 * 4096 * (4096 + 1024 + 1024 + 4096)
    assert token["attention"] == 6 * 32 * 2 * 4096 * 4096
    assert token["mlp"] == 6 * 32 * 3 * 4096 * 14336
    assert token["logits"] == 6 * 4096 * 128256
    assert sum(token.values()) == pytest.approx(5.147e10, rel=1e-3)


def test_flops_are_proportional_to_the_batch() -> None:
    cfg = config({"preset": "gpt_tiny"})
    assert flops.step_flops(config({"preset": "gpt_tiny"}, global_batch_size=8)) == 2 * flops.step_flops(cfg)


@pytest.mark.parametrize("args", [["--make-vocab-size-divisible-by", "1"], ["--make-vocab-size-divisible-by=1"]])
def test_another_padding_is_read(args: list[str]) -> None:
    cfg = config({"preset": "gpt_tiny"}, megatron_args=args)
    assert flops.step_flops(cfg) == pytest.approx(megatron_flops(cfg, 4000), rel=1e-12)


@pytest.mark.parametrize(
    "arg", ["--moe-layer-freq=2", "--moe-latent-size=64", "--multi-latent-attention", "--hybrid-override-pattern=M*"]
)
def test_another_model_is_not_guessed(arg: str) -> None:
    with pytest.raises(flops.UnknownFlopsError, match=arg.partition("=")[0]):
        flops.step_flops(config({"preset": "gpt_tiny"}, megatron_args=[arg]))


def test_documents_have_unknown_flops() -> None:
    cfg = config({"preset": "gpt_tiny"})
    varlen = cfg.overlap.model_copy(update={"varlen": VarlenOverlap(method="masked")})
    with pytest.raises(flops.UnknownFlopsError, match=r"overlap\.varlen\.method: masked"):
        flops.step_flops(cfg.model_copy(update={"overlap": varlen}))


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA H800", 989.4),
        ("NVIDIA H20", 148.0),
        ("NVIDIA A100-SXM4-80GB", 311.9),
        ("NVIDIA A100 80GB PCIe", 311.9),
        ("NVIDIA A10", 125.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L40", 181.1),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L20", 119.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
    ],
)
def test_the_peak_of_a_device_name_is_that_of_its_data_sheet(name: str, tflops: float) -> None:
    peak = flops.known_peak(name, "bf16")
    assert peak is not None
    assert peak.tflops == tflops
    assert peak.source.startswith("data sheet")


def test_a_device_without_a_data_sheet_figure_has_no_known_peak() -> None:
    assert flops.known_peak("x86_64", "bf16") is None
    assert flops.known_peak("NVIDIA H100 80GB HBM3", "fp32") is None
    assert flops.known_peak("NVIDIA A1000", "bf16") is None
    assert flops.known_peak("NVIDIA A10G", "bf16") is None
    assert flops.known_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16") is None


def test_the_peak_of_a_cpu_is_measured_on_all_ranks_at_once(
    forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", forked_python.executable)
    peak = flops.find_peak("x86_64", "cpu", "fp32", 1, 2)
    assert peak.source.startswith("measured")
    assert "2 processes at once, 1 thread each" in peak.source
    # A core between a small one and one with wide vector units.
    assert 0.001 < peak.tflops < 2
