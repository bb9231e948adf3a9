"""Runs TransformerEngine's linear layers and models of them with and without the plugin, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import BATCH, IN, OPS, OUT, TENSOR, start


@dataclass(frozen=True)
class Layer:
    """One layer and one call of it.

    Attributes:
        kind: `column`, `row`, or `norm`: a column-parallel layer that starts with a norm.
        fused: gradient accumulation fusion: the weight gradient is added to `main_grad`.
        microbatches: calls before the gradients are compared.
        config: further fields of Megatron's configuration.
    """

    kind: str
    dtype: torch.dtype = torch.float32
    bias: bool = True
    skip_bias_add: bool = False
    sequence_parallel: bool = True
    normalization: str = "RMSNorm"
    zero_centered: bool = False
    fused: bool = False
    recompute: bool = False
    frozen: bool = False
    microbatches: int = 1
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def direction(self) -> str:
        """Whether the weight is cut by columns or rows."""
        return "row" if self.kind == "row" else "column"


@functools.cache
def tensor_group(size: int) -> dist.ProcessGroup:
    """The tensor-parallel group of this rank, of `size` ranks that follow each other."""
    groups = [dist.new_group(list(range(at, at + size))) for at in range(0, dist.get_world_size(), size)]
    return groups[dist.get_rank() // size]


def make_config(group: dist.ProcessGroup, dtype: torch.dtype, kind: Any = None, **settings: Any) -> Any:
    """A configuration of Megatron for `group.size()` tensor-parallel ranks."""
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend

    made: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": IN,
        "num_attention_heads": 4,
        "tensor_model_parallel_size": group.size(),
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "attention_backend": AttnBackend.unfused,
    }
    return (kind or TransformerConfig)(**{**made, **settings})


def make_layer(group: dist.ProcessGroup, case: Layer) -> Any:
    """A layer with the same random parameters on every call."""
    from megatron.core.extensions import transformer_engine as extension

    config = make_config(
        group,
        case.dtype,
        sequence_parallel=case.sequence_parallel,
        normalization=case.normalization,
        layernorm_zero_centered_gamma=case.zero_centered,
        gradient_accumulation_fusion=case.fused,
        **case.config,
    )
    common: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": case.bias}
    common |= {"skip_bias_add": case.skip_bias_add, "is_expert": False, "tp_group": group}
    torch.manual_seed(11)
    if case.kind == "row":
        layer = extension.TERowParallelLinear(IN, OUT, input_is_parallel=True, **common)
    else:
        made = extension.TEColumnParallelLinear if case.kind == "column" else extension.TELayerNormColumnParallelLinear
        layer = made(IN, OUT, gather_output=False, **common)
    layer = layer.to(case.dtype)
    with torch.no_grad():
        if case.bias:
            # A row-parallel bias is the same on all ranks.
            generator = torch.Generator().manual_seed(23 + group.rank() * (case.kind != "row"))
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
        for name in ("layer_norm_weight", "layer_norm_bias"):
            parameter = layer._parameters.get(name)
            if parameter is not None:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    layer.weight.requires_grad_(not case.frozen)
    if case.fused:
        layer.weight.main_grad = torch.zeros(layer.weight.shape)
        layer.weight.grad_added_to_main_grad = False
    return layer


def make_data(group: dist.ProcessGroup, case: Layer, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rank's input and output gradient of one micro-batch, `[S, B, H]`."""
    ranks = group.size()
    whole, own = 3 * ranks, 3 * ranks // (ranks if case.sequence_parallel else 1)
    # Without sequence parallelism all ranks have the input of a column-parallel layer, and a row-parallel output.
    row = case.kind == "row"
    x_shape = (whole, BATCH, IN // ranks) if row else (own, BATCH, IN)
    dy_shape = (own, BATCH, OUT) if row else (whole, BATCH, OUT // ranks)
    shared = 0 if case.sequence_parallel else 1
    x_seed, dy_seed = 31 + 100 * number, 57 + 100 * number
    x = _random(x_shape, x_seed + (0 if shared and not row else group.rank()))
    return x.to(case.dtype), _random(dy_shape, dy_seed + (0 if shared and row else group.rank())).to(case.dtype)


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run_layer(layer: Any, case: Layer, group: dist.ProcessGroup) -> dict[str, Any]:
    """Forward and backward of all micro-batches: outputs, returned biases, and every gradient."""
    from megatron.core.tensor_parallel import checkpoint

    found: dict[str, Any] = {}
    for number in range(case.microbatches):
        x, dy = make_data(group, case, number)
        leaf = x.requires_grad_()
        bias: list[Any] = []

        def forward(value: torch.Tensor, bias: list[Any] = bias) -> torch.Tensor:
            y, left = layer(value)
            bias[:] = [left]
            return y

        assert layer.is_first_microbatch == (number == 0)
        y = checkpoint(forward, False, leaf) if case.recompute else forward(leaf)
        y.backward(dy)
        assert layer.is_first_microbatch is False
        found |= {f"y {number}": y.detach(), f"dx {number}": leaf.grad, f"left {number}": bias[0]}
    for name, parameter in layer.named_parameters():
        found[name] = parameter.grad
    if case.fused:
        assert layer.weight.grad_added_to_main_grad
        assert layer.weight.grad.dtype == case.dtype, "what makes Megatron's data-parallel hook run"
        found["weight"] = layer.weight.main_grad
    return found


def exact_layer(layer: Any, case: Layer, group: dist.ProcessGroup) -> dict[str, Any]:
    """What `run_layer` returns, computed in float64 by the plain program."""
    leaves = {name: parameter.detach().double() for name, parameter in layer.named_parameters()}
    for name, leaf in leaves.items():
        leaf.requires_grad_(layer.get_parameter(name).requires_grad)
    found: dict[str, Any] = {}
    for number in range(case.microbatches):
        x, dy = (tensor.double() for tensor in make_data(group, case, number))
        value = x.requires_grad_()
        if case.kind == "norm":
            gamma = leaves["layer_norm_weight"] + float(case.zero_centered)
            if case.normalization == "RMSNorm":
                value = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + layer.eps) * gamma
            else:
                value = F.layer_norm(value, value.shape[-1:], gamma, leaves["layer_norm_bias"], layer.eps)
        y = OPS[case.direction, not case.sequence_parallel](value, leaves["weight"], group=group)
        if case.bias and not case.skip_bias_add:
            y = y + leaves["bias"]
        y.backward(dy)
        found |= {f"y {number}": y.detach(), f"dx {number}": x.grad, f"left {number}": None}
        if case.skip_bias_add:
            found[f"left {number}"] = leaves["bias"].detach()
    return found | {name: leaf.grad for name, leaf in leaves.items()}


def compare(name: str, mine: Any, stock: Any, exact: Any) -> None:
    """The error against float64 is at most twice that of stock, or within rounding."""
    assert (mine is None) == (stock is None) == (exact is None), name
    if exact is None:
        return
    assert mine.dtype == stock.dtype, name
    assert mine.shape == stock.shape == exact.shape, name
    far, stock_far = ((value.double() - exact).abs().max() for value in (mine, stock))
    rounding = torch.finfo(stock.dtype).eps * exact.abs().max()
    assert far <= 2 * stock_far + rounding, f"{name}: {far:.3e} from float64, stock {stock_far:.3e}"


def against_stock(
    world: dist.ProcessGroup, case: Layer, num_ranks: int = 2, check: bool = False
) -> tuple[list[tuple[str, str, int]], dict[str, float]]:
    """One layer on groups of `num_ranks`, equal to stock. Returns overlapped calls and results of check mode."""
    start(world)
    group = tensor_group(num_ranks)
    stock = run_layer(make_layer(group, case), case, group)
    exact = exact_layer(make_layer(group, case), case, group)
    config = OverlapConfig.model_validate({"tensor": TENSOR, "check": {"every": int(check)}})
    with enable(config, strict=True) as session:
        session.next_step()
        mine = run_layer(make_layer(group, case), case, group)
        report = session.report()
    assert sorted(mine) == sorted(stock) == sorted(exact)
    for name in stock:
        compare(name, mine[name], stock[name], exact[name])
    calls = [(site.op, site.direction, tally.overlapped) for site, tally in report.sites.items()]
    return calls, dict(report.numerics_check)


def tuned(world: dist.ProcessGroup, fused: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """A layer with a norm and a row-parallel layer under `method: auto`; every call is equal to stock.

    Returns the candidate of each call, and the selections at the end.
    """
    from tests.adapters.tensor_parallel.autotune_workers import CALLS, config, few_trials, follow

    start(world)
    group, cases = tensor_group(2), (Layer("norm", fused=fused), Layer("row", fused=fused))
    stock = [run_layer(make_layer(group, case), case, group) for case in cases]
    exact = [exact_layer(make_layer(group, case), case, group) for case in cases]
    with few_trials(), enable(config(None), strict=True) as session:
        ran = follow(session)
        for _ in range(CALLS):
            for case, theirs, true in zip(cases, stock, exact, strict=True):
                mine = run_layer(make_layer(group, case), case, group)
                for name in theirs:
                    compare(f"{case.kind} {name} {ran[-1]}", mine[name], theirs[name], true[name])
        return ran, session.report().as_dict()["autotuning"]


def reasons_with_fp8(world: dist.ProcessGroup) -> list[str | None]:
    """The reason of one layer outside and inside of TransformerEngine's fp8 context, and in a bf16 layer inside it."""
    start(world)
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import fp8_autocast

    from megatron_overlap.adapters.tensor_parallel.eligibility import unsupported_te_reason

    layer = make_layer(tensor_group(2), Layer("column", torch.bfloat16, config={"fp8": "hybrid"}))
    reasons = [unsupported_te_reason(layer)]
    with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
        reasons.append(unsupported_te_reason(layer))
        with fp8_autocast(enabled=False):
            reasons.append(unsupported_te_reason(layer))
    return reasons


def falls_back(world: dist.ProcessGroup, case: Layer, what: str) -> list[str]:
    """A layer that is not overlapped: equal to stock, errors too. Returns the reasons."""
    start(world)
    from megatron.core.extensions import transformer_engine as extension

    group = tensor_group(2)

    def run() -> Any:
        layer = make_layer(group, case)
        prepared = {
            "recipe": ("te_quant_params", extension.TEQuantizationParams(extension.TEQuantizationRecipe(), None)),
            "overwrites": ("weight.overwrite_main_grad", True),
            "userbuffers": ("config.tp_comm_overlap", True),
            "delayed": ("config.delay_wgrad_compute", True),
        }.get(what)
        if prepared is not None:
            path, value = prepared
            holder = layer
            *owners, last = path.split(".")
            for name in owners:
                holder = getattr(holder, name)
            setattr(holder, last, value)
        x, _ = make_data(group, case, 0)
        return layer(torch.cat([x, x[:1]]) if what == "odd" else x)[0]

    with enable(OverlapConfig(tensor=TENSOR)) as session:
        try:
            mine = run()
        except ValueError as error:
            mine = str(error)
        report = session.report()
    if isinstance(mine, str):
        with pytest.raises(ValueError, match="should be divisible by tensor parallel size"):
            run()
    else:
        assert torch.equal(mine, run())
    assert not any(tally.overlapped for tally in report.sites.values())
    return [reason for tally in report.sites.values() for reason in tally.fallbacks]


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
                parameter.add_(0.2 * _random(tuple(parameter.shape), seed))
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
        x = _random((own, case.batch, IN), 5 + group.rank()).to(model.config.params_dtype)
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
