"""Runs Megatron's SelfAttention with and without query split, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import hook_of_megatron, start

TENSOR = {"method": "p2p", "chunks_per_rank": 2, "attention": "query_split"}
BATCH, HIDDEN, HEADS, LAYER = 2, 64, 8, 2


def make_attention(dtype: torch.dtype, **config: Any) -> Any:
    """A self attention of the local specification, with the same random weights on every call."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {"sequence_parallel": True, "attention_dropout": 0.0, **config}
    made = TransformerConfig(
        num_layers=LAYER,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_group().size(),
        use_cpu_initialization=True,
        params_dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32,
        bf16=dtype == torch.bfloat16,
        **settings,
    )
    torch.manual_seed(11)
    layer = build_module(get_gpt_layer_local_spec().submodules.self_attention, config=made, layer_number=LAYER)
    if layer.linear_proj.bias is not None:
        with torch.no_grad():
            layer.linear_proj.bias.copy_(torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3)))
    return layer


def make_data(group: dist.ProcessGroup, positions: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's positions of the hidden states and of the output's gradient."""
    generator = torch.Generator().manual_seed(31 + group.rank())
    shape = (positions // group.size(), BATCH, HIDDEN)
    # The scale of normalised activations, so that softmax is far from uniform.
    return 4 * torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def step(
    layer: Any, x: torch.Tensor, dy: torch.Tensor, *, mask: Any = None, recompute: bool = False
) -> dict[str, torch.Tensor | None]:
    """Forward and backward: the output, the bias that was not added, the gradients of input and weights."""
    x = x.detach().to(layer.linear_proj.weight.dtype, copy=True).requires_grad_()
    bias: list[Any] = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        y, left = layer(value, mask)
        bias[:] = [left]
        return y

    if recompute:
        from megatron.core.tensor_parallel import checkpoint

        y = checkpoint(forward, False, x)
    else:
        y = forward(x)
    y.backward(dy.to(y.dtype))
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "left": bias[0], "dx": x.grad, **grads}


def against_stock(
    group: dist.ProcessGroup,
    dtype: torch.dtype,
    *,
    fused: bool = False,
    frozen: bool = False,
    evaluated: bool = False,
    recompute: bool = False,
    **config: Any,
) -> list[tuple[str, str, int, int]]:
    """One layer with and without the plugin, compared with stock in float64. Returns the counted calls."""
    start(group)
    x, dy = make_data(group)
    x, dy = x.to(dtype), dy.to(dtype)

    def fresh() -> Any:
        layer = make_attention(dtype, **config)
        layer.linear_proj.weight.requires_grad_(not frozen)
        return layer.train(not evaluated)

    stock = step(fresh(), x, dy, recompute=recompute)
    # Megatron narrows by its config, not by its weights: float64 needs the fp32 one, with the same numbers.
    double = make_attention(torch.float32, **config).double()
    double.load_state_dict(fresh().state_dict())
    double.linear_proj.weight.requires_grad_(not frozen)
    exact = step(double, x, dy)
    layer = fresh()
    weight = layer.linear_proj.weight
    if fused:
        layer.linear_proj.gradient_accumulation_fusion = True
        weight.main_grad = torch.ones(weight.shape)
        weight.grad_added_to_main_grad = False
    with enable(OverlapConfig(tensor=TENSOR), strict=True) as session:
        mine = step(layer, x, dy, recompute=recompute)
        sites = session.report().sites
    assert "forward" not in vars(layer.core_attention)
    assert "forward" not in vars(layer.linear_proj)
    if fused:
        assert weight.grad_added_to_main_grad
        mine["linear_proj.weight"] = weight.main_grad - 1
    for name, true in exact.items():
        _compare(name, mine[name], stock[name], true, 1.0 if fused else 0.0)
    return [(s.op, s.direction, tally.overlapped, tally.moved_bytes) for s, tally in sites.items()]


def _compare(name: str, mine: Any, stock: Any, exact: Any, shift: float) -> None:
    """The error against float64 is at most twice that of stock, or within rounding."""
    assert (mine is None) == (stock is None) == (exact is None), name
    if exact is None:
        return
    far, stock_far = ((value.double() - exact).abs().max() for value in (mine, stock))
    rounding = torch.finfo(stock.dtype).eps * exact.abs().max() + torch.finfo(torch.float32).eps * shift
    assert far <= 2 * stock_far + rounding, f"{name}: {far:.3e} from float64, stock {stock_far:.3e}"


def falls_back(group: dist.ProcessGroup, what: str, strict: bool) -> tuple[list[str], str]:
    """A layer without query split: returns the reasons and the error; without `strict` it must equal stock."""
    from megatron.core.transformer.enums import AttnMaskType

    from megatron_overlap.counters import FallbackError

    start(group)
    x, dy = make_data(group)
    config: dict[str, Any] = {
        "window": {"window_size": (3, 0)},
        "dropout": {"attention_dropout": 0.1},
        "offset": {"softmax_type": "off-by-one"},
        "selective": {"recompute_granularity": "selective"},
        "gate": {"attention_output_gate": True},
        "plain": {"sequence_parallel": False},
    }.get(what, {})
    future = torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]

    def run() -> dict[str, Any]:
        layer = make_attention(torch.float32, **config)
        if what == "padding":
            layer.core_attention.attn_mask_type = AttnMaskType.padding
        if what == "context":
            layer.config.context_parallel_size = 2
        if what == "hook":
            layer.core_attention.register_forward_hook(lambda module, inputs, output: output * 2)
        if what == "gradient hook":
            layer.core_attention.register_full_backward_hook(lambda module, dx, dy: (2 * dx[0], *dx[1:]))
        if what == "pre-hook":
            layer.linear_proj.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 2,))
        if what == "backward hook":
            layer.linear_proj.register_full_backward_hook(lambda *_: None)
        torch.manual_seed(5)
        return step(layer, x, dy, mask=future if what in ("mask", "padding") else None)

    stock = run()
    error = ""
    with enable(OverlapConfig(tensor=TENSOR), strict=strict) as session:
        try:
            mine = run()
        except FallbackError as raised:
            error = str(raised)
        sites = session.report().sites
    if not error:
        for name, value in stock.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5, msg=name)
    mine_only = [tally for site, tally in sites.items() if site.op == "query_split"]
    assert not any(tally.overlapped for tally in mine_only)
    return [reason for tally in mine_only for reason in tally.fallbacks], error


class Causal(torch.nn.Module):
    """The core attention of multi-latent attention, which Megatron has for TransformerEngine alone."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """`[S, B, heads, size]` to `[S, B, heads x size]`."""
        heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
        return context.permute(2, 0, 1, 3).flatten(2)


def latent(group: dist.ProcessGroup) -> dict[tuple[str, str], int]:
    """Megatron's multi-latent attention, equal with and without the plugin; returns the number of calls of each op."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    start(group)
    x, dy = make_data(group)
    config = MLATransformerConfig(
        num_layers=LAYER,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        tensor_model_parallel_size=group.size(),
        sequence_parallel=True,
        use_cpu_initialization=True,
        add_bias_linear=False,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_head_dim=8,
        qk_pos_emb_head_dim=8,
        v_head_dim=8,
        rope_type="rope",
    )
    spec = get_gpt_layer_local_spec(multi_latent_attention=True).submodules.self_attention
    spec.submodules.core_attention = Causal

    def run() -> dict[str, torch.Tensor | None]:
        torch.manual_seed(11)
        return step(build_module(spec, config=config, layer_number=LAYER), x, dy)

    stock = run()
    with enable(OverlapConfig(tensor={"method": "p2p", "chunks_per_rank": 2}), strict=True) as session:
        mine = run()
        sites = session.report().sites
    for name, value in stock.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}")
    counts: dict[tuple[str, str], int] = {}
    for site, tally in sites.items():
        counts[site.op, site.direction] = counts.get((site.op, site.direction), 0) + tally.overlapped
    return counts


def operation_in_between(group: dist.ProcessGroup) -> str:
    """The input of the projection is not the output of the core attention: returns the error."""
    start(group)
    x, dy = make_data(group)
    layer = make_attention(torch.float32)
    layer.linear_proj.register_forward_pre_hook(hook_of_megatron(lambda module, inputs: (inputs[0] * 2,)))
    with enable(OverlapConfig(tensor=TENSOR)):
        try:
            step(layer, x, dy)
        except RuntimeError as error:
            return str(error)
    return ""
