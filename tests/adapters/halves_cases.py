"""What the workers run: Megatron's own transformer layers, whole by stock and in halves by the plugin."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.layer_cases import start
from tests.adapters.mlp_cases import _gathered_late
from tests.ops.halves_cases import Logged

HIDDEN, SEQUENCE = 16, 9
HALVES = {"tensor": {"method": "p2p", "micro_batch": "halves"}}


def make_layers(group: dist.ProcessGroup, dtype: torch.dtype, **settings: Any) -> torch.nn.ModuleList:
    """Two layers of the local spec; the same weights whenever they are made."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    settings = {"hidden_dropout": 0.0, "attention_dropout": 0.0, **settings}
    config = TransformerConfig(
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=group.size(),
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        **settings,
    )
    torch.manual_seed(11)
    submodules = get_gpt_layer_local_spec().submodules
    layers = torch.nn.ModuleList(TransformerLayer(config, submodules, layer_number=n) for n in (1, 2))
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return layers.to(dtype)


def _step(
    layers: torch.nn.ModuleList, x: torch.Tensor, dy: torch.Tensor, rows: int, masks: int
) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    mask = torch.ones(rows, rows, dtype=torch.bool).triu(1).expand(masks, 1, rows, rows).clone()
    if masks > 1:
        mask[-1, :, 1:, 0] = True  # the last one's own
    y = x
    for layer in layers:
        y = layer(hidden_states=y, attention_mask=mask)[0]
    y.backward(dy)
    grads = {name: parameter.grad for name, parameter in layers.named_parameters() if parameter.grad is not None}
    return {"y": y.detach(), "dx": x.grad, **grads}  # type: ignore[dict-item]


def against_stock(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 4,
    masks: int = 1,
    late: bool = False,
    **settings: Any,
) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Output and all gradients, equal to stock. Returns calls by op and direction, and reasons of what was left."""
    start(group)
    if "activation_func" in settings:
        settings["activation_func"] = getattr(torch.nn.functional, settings["activation_func"])
    generator = torch.Generator().manual_seed(31)
    rows = SEQUENCE // group.size() * group.size() if settings.get("sequence_parallel") else SEQUENCE
    own = rows // group.size() if settings.get("sequence_parallel") else rows
    x, dy = (torch.randn(own, batch, HIDDEN, generator=generator).to(dtype) for _ in range(2))

    def run() -> dict[str, torch.Tensor]:
        layers = make_layers(group, dtype, **settings)
        for layer in layers if late else []:
            _gathered_late(layer.mlp)
        return _step(layers, x, dy, rows, masks)

    stock = run()
    with enable(OverlapConfig.model_validate(HALVES)) as session:
        mine = run()
        sites = session.report().sites
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    for name, value in stock.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(mine[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
    assert sorted(mine) == sorted(stock)
    calls: dict[tuple[str, str], int] = {}
    for site, tally in sites.items():
        calls[site.op, site.direction] = calls.get((site.op, site.direction), 0) + tally.overlapped
    return calls, [reason for site, tally in sites.items() if site.op == "micro_batch" for reason in tally.fallbacks]


def order(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """When sums of one layer are begun and waited for, in forward and in backward."""
    start(group)
    from megatron_overlap.adapters import halves

    log: list[str] = []
    names = iter([f"{half}{block} {way}" for block in "12" for half in "ab" for way in ("forward", "backward")])
    original, halves.Reduction = halves.Reduction, lambda group: Logged(group, next(names), log)  # type: ignore[assignment,misc]
    try:
        layer = make_layers(group, torch.float32)[0]
        with enable(OverlapConfig.model_validate(HALVES)):
            x = torch.randn(SEQUENCE, 2, HIDDEN, requires_grad=True)
            mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
            y = layer(hidden_states=x, attention_mask=mask)[0]
            forward = [line.replace(" forward", "") for line in log]
            log.clear()
            y.sum().backward()
    finally:
        halves.Reduction = original  # type: ignore[misc]
    return forward, [line.replace(" backward", "") for line in log]
