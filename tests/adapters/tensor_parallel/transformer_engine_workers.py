"""Runs TransformerEngine's linear layers with and without the plugin, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

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
    x = random_tensor(x_shape, x_seed + (0 if shared and not row else group.rank()))
    return x.to(case.dtype), random_tensor(dy_shape, dy_seed + (0 if shared and row else group.rank())).to(case.dtype)


def random_tensor(shape: tuple[int, ...], seed: int) -> torch.Tensor:
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


def compare(name: str, mine: Any, stock: Any, exact: Any, dtype: torch.dtype) -> None:
    """The error against float64 is at most twice that of stock, or within rounding.

    On the CPU a product of `dtype` is rounded before it is added to an fp32 `main_grad`.
    """
    assert (mine is None) == (stock is None) == (exact is None), name
    if exact is None:
        return
    assert mine.dtype == stock.dtype, name
    assert mine.shape == stock.shape == exact.shape, name
    far, stock_far = ((value.double() - exact).abs().max() for value in (mine, stock))
    rounding = torch.finfo(dtype).eps * exact.abs().max()
    assert far <= 2 * stock_far + rounding, f"{name}: {far:.3e} from float64, stock {stock_far:.3e}"


def against_stock(
    group: dist.ProcessGroup, case: Layer, check: bool = False
) -> tuple[list[tuple[str, str, int]], dict[str, float]]:
    """One layer, equal to stock. Returns overlapped calls and results of check mode."""
    start(group)
    stock = run_layer(make_layer(group, case), case, group)
    exact = exact_layer(make_layer(group, case), case, group)
    config = OverlapConfig.model_validate({"tensor": TENSOR, "check": {"every": int(check)}})
    with enable(config, strict=True) as session:
        session.next_step()
        mine = run_layer(make_layer(group, case), case, group)
        report = session.report()
    assert sorted(mine) == sorted(stock) == sorted(exact)
    for name in stock:
        compare(name, mine[name], stock[name], exact[name], case.dtype)
    calls = [(site.op, site.direction, tally.overlapped) for site, tally in report.sites.items()]
    return calls, dict(report.numerics_check)


def tuned(group: dist.ProcessGroup, fused: bool) -> tuple[list[str], list[dict[str, Any]]]:
    """A layer with a norm and a row-parallel layer under `method: auto`; every call is equal to stock.

    Returns the candidate of each call, and the selections at the end.
    """
    from tests.adapters.tensor_parallel.autotune_workers import FEW_CALLS, config, follow
    from tests.autotune.trials import few_trials

    start(group)
    cases = Layer("norm", fused=fused), Layer("row", fused=fused)
    stock = [run_layer(make_layer(group, case), case, group) for case in cases]
    exact = [exact_layer(make_layer(group, case), case, group) for case in cases]
    with few_trials(), enable(config(None, chunks_per_rank=1), strict=True) as session:
        ran = follow(session)
        for _ in range(FEW_CALLS):
            for case, theirs, true in zip(cases, stock, exact, strict=True):
                mine = run_layer(make_layer(group, case), case, group)
                for name in theirs:
                    compare(f"{case.kind} {name} {ran[-1]}", mine[name], theirs[name], true[name], case.dtype)
        return ran, session.report().as_dict()["autotuning"]


def reasons_with_fp8(group: dist.ProcessGroup) -> list[str | None]:
    """The reason of one layer outside and inside of TransformerEngine's fp8 context, and in a bf16 layer inside it."""
    start(group)
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch import fp8_autocast

    from megatron_overlap.adapters.tensor_parallel.eligibility import unsupported_te_reason

    layer = make_layer(group, Layer("column", torch.bfloat16, config={"fp8": "hybrid"}))
    reasons = [unsupported_te_reason(layer)]
    with fp8_autocast(enabled=True, fp8_recipe=DelayedScaling()):
        reasons.append(unsupported_te_reason(layer))
        with fp8_autocast(enabled=False):
            reasons.append(unsupported_te_reason(layer))
    return reasons


def falls_back(group: dist.ProcessGroup, case: Layer, what: str) -> list[str]:
    """A layer that is not overlapped: equal to stock, errors too. Returns the reasons."""
    start(group)
    from megatron.core.extensions import transformer_engine as extension

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
