"""Worker functions of test_autotune.py: Megatron's linear layers under `method: auto`."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.adapters.tensor_parallel.autotune import LinearAutotuner
from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.autotune.candidates import STOCK, Candidate
from megatron_overlap.autotune.search import calls_to_select
from megatron_overlap.autotune.tuner import AutotuneError
from megatron_overlap.session import Session
from tests.adapters.tensor_parallel.linear_workers import make_data, make_layer, start, step

RANKS = 4
# Enough for a selection of every kind of call, and some for backward passes that run late: at 16 rows a rank there are
# six p2p candidates, and two with one chunk.
CALLS = calls_to_select(7) + 20
FEW_CALLS = calls_to_select(3) + 20
FREE_CALLS = 66


def follow(session: Session) -> list[str]:
    """Records the candidate of each call of the session from now on, except calls of `runs_stock`."""
    ran: list[str] = []
    autotuner = LinearAdapter.of(session).autotuner
    run = autotuner._run_candidate

    def recording(call: LinearCall, candidate: Candidate) -> Any:
        ran.append(f"{call.op} {candidate}")
        return run(call, candidate)

    autotuner._run_candidate = recording
    return ran


def config(folder: str | None, **tensor: Any) -> OverlapConfig:
    return OverlapConfig(tensor={"method": "auto", "autotune_cache": folder, **tensor})


def trained(
    group: dist.ProcessGroup, kinds: list[str], plain: bool, calls: int, folder: str | None, *, uneven: bool = False
) -> tuple[list[str], list[dict[str, Any]], str]:
    """Runs layers many times and compares each call with the stock path.

    Args:
        group: the ranks.
        kinds: of the layers.
        plain: without sequence parallelism.
        calls: of each layer.
        folder: of the cache.
        uneven: every rank is slow at random, so that ranks measure different times.

    Returns:
        The candidate of each call, and the selections at the end: as data and as the printed report.
    """
    start(group)
    ranks, rank = group.size(), group.rank()
    data = {kind: make_data(kind, torch.float32, 8 * ranks, ranks, rank, parallel=not plain) for kind in kinds}

    def fresh(kind: str) -> Any:
        return make_layer(kind, torch.float32, sequence_parallel=not plain)

    stock = {kind: step(fresh(kind), *data[kind]) for kind in kinds}
    generator = torch.Generator().manual_seed(rank)
    with enable(config(folder), strict=True) as session:
        ran = follow(session)
        for _ in range(calls):
            for kind in kinds:
                if uneven:
                    time.sleep(0.003 * torch.rand((), generator=generator).item())
                mine = step(fresh(kind), *data[kind])
                for name, value in stock[kind].items():
                    what = f"{kind} {name} {ran[-1]}"
                    torch.testing.assert_close(mine[name], value, rtol=2e-5, atol=2e-5, msg=what)
        report = session.report()
    return ran, report.as_dict()["autotuning"], report.render(width=200)


def evaluated(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Runs calls without gradients and calls with activation recomputation; the selections at the end."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    with enable(config(None, chunks_per_rank=1), strict=True) as session:
        layer = make_layer("column", torch.float32)
        for _ in range(FEW_CALLS):
            with torch.no_grad():
                layer(x.clone())
        for _ in range(FEW_CALLS):
            step(layer, x, dy, recompute=True)
        lines: list[dict[str, Any]] = session.report().as_dict()["autotuning"]
        return lines


def shared_input(group: dist.ProcessGroup) -> tuple[list[str], int]:
    """Two layers of one input in every step: the candidates of all calls, and the bytes that the forwards sent."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    layers = [make_layer("column", torch.float32) for _ in range(2)]
    with enable(config(None), strict=True) as session:
        ran = follow(session)
        for _ in range(40):
            leaf = x.clone().requires_grad_()
            (layers[0](leaf)[0] + layers[1](leaf)[0]).backward(dy)
        tallies = session.report().sites
    forward = next(tally for site, tally in tallies.items() if site.direction == "forward")
    return ran, forward.moved_bytes


class FreeCalls(NamedTuple):
    """Calls of a layer whose selection is the stock path.

    Attributes:
        searched: calls that the search counted.
        counted: calls that the report counts as selected stock calls.
        through_run: calls that did not take `runs_stock`.
        other: what a call of another shape, one without gradients, and one with a second layer of the same input each
            add to the calls of the search.
    """

    searched: int
    counted: int
    through_run: int
    other: list[int]


def free_calls(group: dist.ProcessGroup, kind: str) -> FreeCalls:
    """Runs a layer whose selection is the stock path; the second layer of its input ran beside it while measuring."""
    start(group)
    x, dy = make_data(kind, torch.float32, 8 * group.size(), group.size(), group.rank())
    layer, other = make_layer(kind, torch.float32), make_layer(kind, torch.float32)
    stock = step(make_layer(kind, torch.float32), x, dy)
    with enable(config(None, chunks_per_rank=1, schedule="direct"), strict=True) as session:
        autotuner: LinearAutotuner = LinearAdapter.of(session).autotuner

        def run(times: int) -> None:
            for _ in range(times):
                layer.zero_grad(set_to_none=True)
                for name, value in step(layer, x, dy).items():
                    torch.testing.assert_close(value, stock[name], rtol=2e-5, atol=2e-5)

        run(1)
        leaf = x.clone().requires_grad_()
        (layer(leaf)[0] + other(leaf)[0]).backward(dy)
        (of_group,) = autotuner._autotuners.values()
        (only,) = of_group.kinds.values()
        search = only.search
        while search.measuring:
            run(1)
        search.selected = search.selected._replace(candidate=STOCK)
        run(1)
        ran, calls, counted = follow(session), search.calls, _selected_stock(session)
        run(FREE_CALLS)
        searched, counted, through_run = search.calls - calls, _selected_stock(session) - counted, len(ran)
        others = []
        for case in ("shape", "no gradient", "same input"):
            calls = search.calls
            leaf = x.clone().requires_grad_()
            if case == "shape":
                layer(torch.cat([x, x]))
            elif case == "no gradient":
                with torch.no_grad():
                    layer(x)
            else:
                layer(leaf), other(leaf)
            others.append(search.calls - calls)
    return FreeCalls(searched, counted, through_run, others)


def _selected_stock(session: Session) -> int:
    return sum(tally.stock_selected for tally in session.report().sites.values())


def different_layers(group: dist.ProcessGroup) -> str:
    """One rank calls a layer of another shape; the error that this rank gets."""
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
