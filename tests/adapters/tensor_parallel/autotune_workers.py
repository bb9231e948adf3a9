"""What the workers run for test_choice.py: Megatron's own layers under `method: auto`."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.adapters.tensor_parallel.autotune import TensorChoice
from megatron_overlap.adapters.tensor_parallel.linear import LinearAdapter
from megatron_overlap.autotune.candidates import Candidate
from megatron_overlap.autotune.predict import MAX_TRIED
from megatron_overlap.autotune.search import calls_to_choose
from megatron_overlap.autotune.tuner import AutotuneError
from megatron_overlap.session import Session
from tests.adapters.tensor_parallel.linear_workers import make_data, make_layer, start, step

# Enough for every choice to settle, and some for passes that come late.
CALLS = calls_to_choose(1 + MAX_TRIED) + 20
SHORT_CALLS = 66


def follow(session: Session) -> list[str]:
    """Notes what serves each call of the session from now on, those left out that take the short way."""
    served: list[str] = []
    choice: TensorChoice = LinearAdapter.of(session).choice
    serve = choice.serve

    def noting(
        layer: Any,
        kind: str,
        op: str,
        x: Any,
        weight: Any,
        group: Any,
        into: bool,
        run: Any,
        fused: Any,
        **how: Any,
    ) -> Any:
        def noted(candidate: Candidate) -> Any:
            served.append(f"{op} {candidate}")
            return run(candidate)

        return serve(layer, kind, op, x, weight, group, into, noted, fused, **how)

    choice.serve = noting  # type: ignore[method-assign]
    return served


def config(folder: str | None, **tensor: Any) -> OverlapConfig:
    return OverlapConfig(tensor={"method": "auto", "autotune_cache": folder, **tensor})


def trained(
    group: dist.ProcessGroup, kinds: list[str], plain: bool, calls: int, folder: str | None, *, uneven: bool = False
) -> tuple[list[str], list[dict[str, Any]], str]:
    """Layers again and again, each call held against stock; what served each call, and the choices at the end.

    `uneven` lets every rank be slow at random, a different one each time: what ranks measure differs.
    """
    start(group)
    ranks, rank = group.size(), group.rank()
    data = {kind: make_data(kind, torch.float32, 8 * ranks, ranks, rank, parallel=not plain) for kind in kinds}

    def fresh(kind: str) -> Any:
        return make_layer(kind, torch.float32, sequence_parallel=not plain)

    stock = {kind: step(fresh(kind), *data[kind]) for kind in kinds}
    generator = torch.Generator().manual_seed(rank)
    with enable(config(folder), strict=True) as session:
        served = follow(session)
        for _ in range(calls):
            for kind in kinds:
                if uneven:
                    time.sleep(0.003 * torch.rand((), generator=generator).item())
                mine = step(fresh(kind), *data[kind])
                for name, value in stock[kind].items():
                    what = f"{kind} {name} {served[-1]}"
                    torch.testing.assert_close(mine[name], value, rtol=2e-5, atol=2e-5, msg=what)
        report = session.report()
    return served, report.as_dict()["autotuning"], report.render(width=200)


def evaluated(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Calls with no gradient, and calls whose backward never comes, beside those that are trained."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    with enable(config(None), strict=True) as session:
        layer = make_layer("column", torch.float32)
        for _ in range(CALLS):
            with torch.no_grad():
                layer(x.clone())
        for _ in range(CALLS):
            step(layer, x, dy, recompute=True)
        choices: list[dict[str, Any]] = session.report().as_dict()["autotuning"]
        return choices


def shared_input(group: dist.ProcessGroup) -> tuple[list[str], int]:
    """Two layers of one input in every step: what served, and the bytes that the second one's forward sent."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    layers = [make_layer("column", torch.float32) for _ in range(2)]
    with enable(config(None), strict=True) as session:
        served = follow(session)
        for _ in range(40):
            leaf = x.clone().requires_grad_()
            (layers[0](leaf)[0] + layers[1](leaf)[0]).backward(dy)
        tallies = session.report().sites
    forward = next(tally for site, tally in tallies.items() if site.direction == "forward")
    return served, forward.moved_bytes


def short_way(group: dist.ProcessGroup, kind: str) -> tuple[int, int, int, list[int]]:
    """A layer that Megatron's own path serves by choice: calls that were decided, counted, and took the long way.

    Last what each of these adds to the calls decided: another shape, no gradient, a second layer of the same input,
    which was seen beside the first while this was measured.
    """
    start(group)
    x, dy = make_data(kind, torch.float32, 8 * group.size(), group.size(), group.rank())
    layer, other = make_layer(kind, torch.float32), make_layer(kind, torch.float32)
    stock = step(make_layer(kind, torch.float32), x, dy)
    with enable(config(None), strict=True) as session:
        choice: TensorChoice = LinearAdapter.of(session).choice

        def run(times: int) -> None:
            for _ in range(times):
                layer.zero_grad(set_to_none=True)
                for name, value in step(layer, x, dy).items():
                    torch.testing.assert_close(value, stock[name], rtol=2e-5, atol=2e-5)

        run(1)
        leaf = x.clone().requires_grad_()
        (layer(leaf)[0] + other(leaf)[0]).backward(dy)
        (chooser,) = choice._choosers.values()
        (only,) = chooser._kinds.values()
        while only.decider.stage != "settled":
            run(1)
        only.decider.choice = replace(only.decider.choice, candidate=0)
        run(1)
        served, calls, counted = follow(session), only.decider.calls, _own(session)
        run(SHORT_CALLS)
        decided, counted, long = only.decider.calls - calls, _own(session) - counted, len(served)
        others = []
        for what in ("shape", "no gradient", "same input"):
            calls = only.decider.calls
            leaf = x.clone().requires_grad_()
            if what == "shape":
                layer(torch.cat([x, x]))
            elif what == "no gradient":
                with torch.no_grad():
                    layer(x)
            else:
                layer(leaf), other(leaf)
            others.append(only.decider.calls - calls)
    return decided, counted, long, others


def _own(session: Session) -> int:
    return sum(tally.stock_selected for tally in session.report().sites.values())


def different_layers(group: dist.ProcessGroup) -> str:
    """One rank calls a layer of another shape: the error that every rank gets."""
    start(group)
    with enable(config(None)):
        sequence = 8 * group.size() + group.size() * (group.rank() == 1)
        layer = make_layer("column", torch.float32)
        x, _ = make_data("column", torch.float32, sequence, group.size(), group.rank())
        try:
            layer(x)
        except AutotuneError as error:
            return str(error)
    return ""
