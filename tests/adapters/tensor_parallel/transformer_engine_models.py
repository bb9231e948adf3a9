"""Runs models of TransformerEngine's layers with and without the plugin, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.batch_overlap_workers import sum_over_rows
from tests.adapters.tensor_parallel.linear_workers import IN, TENSOR, start
from tests.adapters.tensor_parallel.transformer_engine_workers import make_config, random_tensor


@dataclass(frozen=True)
class Model:
    """A small model of TransformerEngine's layers and one call of it.

    Attributes:
        kind: a key of `MODELS`.
        overwrites: weights with this in their name say that their gradient overwrites `main_grad`, which the plugin
            does not support.
        fused: the gradients of TransformerEngine's weights are added to `main_grad`.
        config: further fields of Megatron's configuration.
        tensor: further fields of `overlap.tensor`.
    """

    kind: str
    dtype: torch.dtype = torch.float32
    batch: int = 2
    strict: bool = True
    overwrites: str = ""
    fused: bool = False
    config: dict[str, Any] = field(default_factory=dict)
    tensor: dict[str, Any] = field(default_factory=dict)


VOCABULARY, POSITIONS = 64, 16
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False}


def _gpt(config: Any, **spec: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from scripts.pretrain_decoder import layer_specification

    layer = layer_specification(config, use_te=True)
    if config.mtp_num_layers:
        spec["mtp_block_spec"] = get_gpt_mtp_block_spec(config, layer, use_transformer_engine=True)
    return GPTModel(config, layer, VOCABULARY, POSITIONS, position_embedding_type="rope", **spec)


def _hybrid(config: Any) -> Any:
    """Attention and MLP layers that the specification names directly, not through a provider."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(config, hybrid_stack_spec, VOCABULARY, POSITIONS, hybrid_layer_pattern="*-*-")


def _bert(config: Any) -> Any:
    from megatron.core.models.bert.bert_layer_specs import get_bert_layer_with_transformer_engine_submodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_layer import TransformerLayer

    submodules = get_bert_layer_with_transformer_engine_submodules()
    return TransformerBlock(config, ModuleSpec(module=TransformerLayer, submodules=submodules))


def _t5(config: Any) -> Any:
    from megatron.core.models.T5.t5_model import T5Model
    from megatron.core.models.T5.t5_spec import (
        get_t5_decoder_with_transformer_engine_block_spec,
        get_t5_encoder_with_transformer_engine_block_spec,
    )

    encoder = get_t5_encoder_with_transformer_engine_block_spec(config.num_layers)
    decoder = get_t5_decoder_with_transformer_engine_block_spec(config.num_layers)
    return T5Model(config, config, encoder, decoder, VOCABULARY, POSITIONS)


MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (_gpt, LLAMA),
    "gpt": (_gpt, {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True, "qk_layernorm": True}),
    "fused MLP": (_gpt, {**LLAMA, "use_transformer_engine_op_fuser": True}),
    "grouped fused MLP": (
        _gpt,
        {**LLAMA, "use_transformer_engine_op_fuser": True, "use_grouped_gemm_for_dense_mlp": True},
    ),
    "MTP": (_gpt, {**LLAMA, "mtp_num_layers": 1}),
    "MLA": (
        _gpt,
        {
            **LLAMA,
            "multi_latent_attention": True,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_head_dim": 8,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 8,
        },
    ),
    "experts": (_gpt, {**LLAMA, "num_moe_experts": 4, "moe_router_topk": 2, "moe_token_dispatcher_type": "allgather"}),
    "hybrid": (_hybrid, {**LLAMA, "num_layers": 4}),
    "BERT": (_bert, {"normalization": "LayerNorm"}),
    "T5": (_t5, {"normalization": "LayerNorm"}),
}


def make_model(group: dist.ProcessGroup, case: Model, dtype: torch.dtype, build: Any = None) -> Any:
    """A model with the same random parameters on every call; norms and biases differ from their defaults.

    `build` makes it of a configuration, in place of the function in `MODELS`.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import MLATransformerConfig

    make, settings = MODELS[case.kind]
    made = {"sequence_parallel": True, "ffn_hidden_size": 2 * IN, **settings, **case.config}
    kind = MLATransformerConfig if made.get("multi_latent_attention") else None
    torch.manual_seed(17)
    model_parallel_cuda_manual_seed(17)
    model = (build or make)(make_config(group, dtype, kind=kind, **made)).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                cut = getattr(parameter, "tensor_model_parallel", False)
                seed = len(name) + 1000 * (group.rank() if cut else 0)
                parameter.add_(0.2 * random_tensor(tuple(parameter.shape), seed))
            elif case.overwrites and case.overwrites in name:
                parameter.overwrite_main_grad = True
    for layer in model.modules() if case.fused else ():
        if "fuse_wgrad_accumulation" in vars(layer):
            layer.fuse_wgrad_accumulation, layer.weight.main_grad = True, torch.zeros(layer.weight.shape)
            layer.weight.grad_added_to_main_grad = False
    return model


def run_model(model: Any, case: Model, group: dist.ProcessGroup) -> dict[str, torch.Tensor]:
    """The loss or output, and every gradient."""
    if case.kind == "BERT":
        own = POSITIONS // (group.size() if model.config.sequence_parallel else 1)
        x = random_tensor((own, case.batch, IN), 5 + group.rank()).to(model.config.params_dtype)
        mask = torch.zeros(case.batch, 1, 1, POSITIONS, dtype=torch.bool)
        mask[0, ..., -3:] = True
        loss = model(x, mask).float().square().mean()
    elif case.kind == "T5":
        ids = torch.randint(0, VOCABULARY, (2, case.batch, POSITIONS), generator=torch.Generator().manual_seed(3))
        padding = torch.zeros(case.batch, 1, 1, POSITIONS, dtype=torch.bool)
        padding[0, ..., -3:] = True
        loss = model(*ids, padding, None, (torch.zeros_like(padding), padding), lm_labels=ids[1]).float().mean()
    else:
        ids = torch.randint(0, VOCABULARY, (case.batch, POSITIONS), generator=torch.Generator().manual_seed(3))
        positions = torch.arange(POSITIONS).expand(case.batch, -1)
        loss = model(ids, positions, None, labels=ids).float().mean()
    loss.backward()
    sum_over_rows(model)
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for name in grads if case.fused else ():
        weight = model.get_parameter(name)
        if hasattr(weight, "main_grad"):
            assert weight.grad_added_to_main_grad
            grads[name] = weight.main_grad
    return {"loss": loss.detach(), **grads}  # type: ignore[dict-item]


def is_linear(module: Any) -> bool:
    """Whether a module is a linear layer of TransformerEngine or of Megatron that has a weight."""
    return type(module).__name__.endswith("Linear") and isinstance(getattr(module, "weight", None), torch.Tensor)


def model_against_stock(world: dist.ProcessGroup, case: Model) -> tuple[dict[str, int], list[str], dict[str, str]]:
    """A model, equal to stock.

    The report lists every linear layer. Returns the overlapped forwards by operation, the reasons of fallbacks, and
    what is not overlapped at all.
    """
    start(world)
    stock = run_model(make_model(world, case, case.dtype), case, world)
    wide = make_model(world, case, torch.float32)
    wide.load_state_dict(make_model(world, case, case.dtype).state_dict(), strict=False)
    exact = stock if case.dtype == torch.float32 else run_model(wide, case, world)
    with enable(OverlapConfig.model_validate({"tensor": {**TENSOR, **case.tensor}}), strict=case.strict) as session:
        model = make_model(world, case, case.dtype)
        mine = run_model(model, case, world)
        report = session.report()
    listed = {(site.kind, site.name) for site in report.sites}
    for layer in filter(is_linear, model.modules()):
        kinds = ("row", "attention") if "Row" in type(layer).__name__ else ("column",)
        counted = any((kind, f"{layer.weight.shape[1]}->{layer.weight.shape[0]}") in listed for kind in kinds)
        assert counted or type(layer).__name__ in report.not_overlapped, f"{layer}: not in the report"
    assert_near_stock(mine, stock, exact, case.dtype)
    return *calls_of(report), dict(report.not_overlapped)


def assert_near_stock(
    mine: dict[str, torch.Tensor], stock: dict[str, torch.Tensor], exact: dict[str, torch.Tensor], dtype: torch.dtype
) -> None:
    """In fp32 loss and gradients differ by at most 1e-5 of their norm, plus the rounding of all gradients together:
    some gradients are sums that nearly cancel. In bf16 their error against fp32, `exact`, is at most three times that
    of stock."""
    assert sorted(mine) == sorted(stock)
    norms = torch.stack([each.double().norm() for each in exact.values()])
    rounding = torch.finfo(torch.float32).eps * float(norms.norm())
    for name, value in stock.items():
        far, stock_far = (float((each.double() - exact[name].double()).norm()) for each in (mine[name], value))
        scale = float(exact[name].double().norm())
        allowed = 1e-5 * scale + rounding if dtype == torch.float32 else 3 * stock_far + 2**-8 * scale
        assert far <= allowed, f"{name}: {far:.3e} of {scale:.3e}, stock {stock_far:.3e}"


def calls_of(report: Any) -> tuple[dict[str, int], list[str]]:
    """The overlapped forwards by operation, and the reasons of fallbacks."""
    calls: dict[str, int] = {}
    for site, tally in report.sites.items():
        if site.direction == "forward" and tally.overlapped:
            calls[site.op] = calls.get(site.op, 0) + tally.overlapped
    reasons = sorted({reason for tally in report.sites.values() for reason in tally.fallbacks})
    return calls, reasons
