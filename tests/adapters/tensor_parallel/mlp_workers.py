"""What the workers run: Megatron's own MLP on all ranks, with and without the plugin."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import start

HIDDEN, FFN, BATCH = 16, 32, 2
TENSOR = {"method": "p2p", "chunks_per_rank": 3}


def make_mlp(group: dist.ProcessGroup, dtype: torch.dtype, **settings: Any) -> Any:
    """An MLP of the local spec; the same weights whenever it is made."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        tensor_model_parallel_size=group.size(),
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        **settings,
    )
    torch.manual_seed(11)
    submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    mlp = MLP(config, submodules, ffn_hidden_size=FFN, tp_group=group)
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for name, parameter in mlp.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mlp


def _step(mlp: Any, x: torch.Tensor, dy: torch.Tensor, recompute: bool) -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import checkpoint

    x = x.clone().requires_grad_()
    y = checkpoint(lambda rows: mlp(rows)[0], False, x) if recompute else mlp(x)[0]
    y.backward(dy)
    grads = {name: parameter.grad for name, parameter in mlp.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def against_stock(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    joint_mlp: str = "auto",
    prepare: str = "nothing",
    **settings: Any,
) -> list[tuple[str, str, str, int]]:
    """Output and all gradients, equal to stock. Returns what was overlapped: kind, op, direction, count."""
    start(group)
    if "activation_func" in settings:
        settings["activation_func"] = getattr(torch.nn.functional, settings["activation_func"])
    generator = torch.Generator().manual_seed(31)
    x, dy = (torch.randn(13, BATCH, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    change: Callable[[Any], None] = PREPARE[prepare]

    def run() -> dict[str, torch.Tensor]:
        made = make_mlp(group, dtype, **settings)
        change(made)
        return _step(made, x, dy, recompute)

    stock = run()
    with enable(OverlapConfig.model_validate({"tensor": {**TENSOR, "joint_mlp": joint_mlp}}), strict=True) as session:
        mine = run()
        sites = session.report().sites
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for name, value in stock.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(mine[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
    assert sorted(mine) == sorted(stock)
    return [(site.kind, site.op, site.direction, tally.overlapped) for site, tally in sites.items()]


def _hook(layer: str, register: str) -> Callable[[Any], None]:
    def prepare(mlp: Any) -> None:
        getattr(getattr(mlp, layer), register)(lambda *_: None)

    return prepare


def _gathered_late(mlp: Any) -> None:
    """As Megatron's --overlap-param-gather: a layer's weight is there when its hook has run, and NaN before."""
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        weight = layer.weight.detach().clone()
        layer.weight.data.fill_(float("nan"))

        def wait(layer: Any, _: Any, weight: torch.Tensor = weight) -> None:
            layer.weight.data.copy_(weight)

        layer.register_forward_pre_hook(wait)


def _frozen(mlp: Any) -> None:
    mlp.linear_fc1.weight.requires_grad_(False)


def _replaced(mlp: Any) -> None:
    mlp.linear_fc2.forward = type(mlp.linear_fc2).forward.__get__(mlp.linear_fc2)


PREPARE: dict[str, Callable[[Any], None]] = {
    "nothing": lambda mlp: None,
    "gathered late": _gathered_late,
    "frozen": _frozen,
    "forward hook": _hook("linear_fc1", "register_forward_hook"),
    "backward hook": _hook("linear_fc2", "register_full_backward_hook"),
    "replaced": _replaced,
}
