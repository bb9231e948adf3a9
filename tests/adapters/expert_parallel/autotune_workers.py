"""Worker functions: two mixture-of-experts layers under `overlap.expert.method: auto`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.autotune.search import calls_to_select
from tests.adapters.expert_parallel.workers import HIDDEN, SHARED, MoECase, make_layer, start
from tests.autotune.trials import Clock, few_trials

DELAY_MS = 30.0
CLOCK = Clock()
with few_trials():
    _CALLS = calls_to_select(2) + 18  # Some run what is selected.
CASE = MoECase(config={**SHARED, "moe_router_load_balancing_type": "none"})
_NOTHING = {"tensor": {"method": "none", "autotune_cache": None}, "data": {"method": "none"}}


class _Delay(torch.autograd.Function):
    """The identity, with a late backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        CLOCK.advance(DELAY_MS / 1e3)
        return grads[0]


def _slow_stock(layer: Any) -> None:
    """Delays the stock dispatcher, which p2p does not call: in backward its last node, in forward its last call."""
    dispatcher = layer.token_dispatcher
    dispatch, combine = dispatcher.token_dispatch, dispatcher.token_combine

    def late_combine(x: torch.Tensor, *rest: Any) -> Any:
        CLOCK.advance(DELAY_MS / 1e3)
        return combine(x, *rest)

    dispatcher.token_dispatch = lambda x, *rest: dispatch(_Delay.apply(x), *rest)
    dispatcher.token_combine = late_combine


def _step(layer: Any, seed: int) -> list[torch.Tensor]:
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randn(5 + rank, 2, HIDDEN, generator=generator).requires_grad_()
    for parameter in layer.parameters():
        parameter.grad = None
    y, _ = layer(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(each.grad for each in layer.parameters() if each.grad is not None)]  # type: ignore[list-item]


def _layers() -> list[Any]:
    layers = [make_layer(CASE) for _ in range(2)]
    for number, layer in enumerate(layers, 1):
        layer.set_layer_number(number)
    return layers


def select(group: dist.ProcessGroup, slow: str) -> dict[str, Any]:
    """What two layers select where one path is slow, and the relative deviations from stock."""
    from megatron_overlap.adapters.expert_parallel.layer import ExpertAdapter

    start(group, CASE)
    layers, plain = _layers(), make_layer(CASE)
    expected = [_step(plain, seed) for seed in range(_CALLS)]
    deviations = []
    config = OverlapConfig.model_validate({**_NOTHING, "expert": {"method": "auto"}})
    with few_trials(), CLOCK.of_tuner(), enable(config) as session:
        adapter: Any = session.adapter(ExpertAdapter)
        for layer in layers if slow == "stock" else ():
            _slow_stock(layer)
        compute = adapter.compute

        def late(*args: Any) -> torch.Tensor:
            CLOCK.advance(DELAY_MS / 1e3)
            result: torch.Tensor = compute(*args)
            return result

        if slow == "p2p":
            adapter.compute = late
        for seed in range(_CALLS):
            for layer in layers:
                for mine, stock in zip(_step(layer, seed), expected[seed], strict=True):
                    deviations.append(float((mine - stock).abs().max() / stock.abs().max().clamp(min=1e-30)))
        report = session.report()
    tally = {site.direction: each for site, each in report.sites.items()}["forward"]
    return {
        "deviations": deviations,
        "lines": report.autotuning,
        "counts": (tally.overlapped, tally.stock_selected),
        "calls": 2 * _CALLS,
    }


def deterministic(group: dist.ProcessGroup) -> tuple[int, Any]:
    """Overlapped calls and what was measured in three steps of a deterministic run."""
    start(group, CASE)
    layer = make_layer(CASE)
    config = {**_NOTHING, "expert": {"method": "auto"}, "deterministic": True}
    with enable(OverlapConfig.model_validate(config)) as session:
        for seed in range(3):
            _step(layer, seed)
        report = session.report()
    return {site.direction: each for site, each in report.sites.items()}["forward"].overlapped, report.autotuning
