"""Worker functions of test_autotune.py: Megatron's linear layers under `method: auto`."""

from __future__ import annotations

import math
import os
import pwd
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.adapters.tensor_parallel.autotune import GroupAutotuners, LinearAutotuner
from megatron_overlap.adapters.tensor_parallel.batch_overlap import _recompute_with
from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.autotune import search
from megatron_overlap.autotune.candidates import SEPARATE_LAYERS, STOCK, Candidate
from megatron_overlap.autotune.search import Search, Timing, calls_to_select
from megatron_overlap.autotune.tuner import AutotuneError, Kind
from megatron_overlap.session import Session
from tests.adapters.tensor_parallel.batch_overlap_workers import HIDDEN, SEQUENCE, make_block, sum_over_rows
from tests.adapters.tensor_parallel.linear_workers import make_data, make_layer, start, step
from tests.autotune.trials import few_trials, one_trial

FREE_CALLS = 66


# Enough for a selection of every kind of call, and some for backward passes that run late: at 16 rows a rank there are
# six p2p candidates, and two with one chunk. Plain layers get the same number: late backward passes take longer there.
with few_trials():
    CALLS = calls_to_select(7) + 20
    FEW_CALLS = calls_to_select(3) + 20


def follow(session: Session) -> list[str]:
    """Records the candidate of each call of the session from now on, except calls of `runs_stock`."""
    ran: list[str] = []
    autotuner = session.adapter(LinearAdapter).autotuner
    run = autotuner._run_candidate

    def recording(call: LinearCall, candidate: Candidate) -> Any:
        ran.append(f"{call.op} {candidate}")
        return run(call, candidate)

    autotuner._run_candidate = recording
    return ran


def config(folder: str | None, **tensor: Any) -> OverlapConfig:
    return OverlapConfig(tensor={"method": "auto", "autotune_cache": folder, **tensor})


def folder_without_home(group: dist.ProcessGroup) -> object:
    """The folder of the default config's cache for a user id that the machine does not know, as in a container."""
    with patch.dict(os.environ), patch.object(pwd, "getpwuid", side_effect=KeyError("getpwuid(): uid not found")):
        os.environ.pop("HOME", None)
        return GroupAutotuners(Session(OverlapConfig()), "auto")._folder


def trained(
    group: dist.ProcessGroup, kinds: list[str], plain: bool, calls: int, **tensor: Any
) -> tuple[list[str], list[dict[str, Any]], str]:
    """Runs layers many times and compares each call with the stock path. Every rank is slow at random.

    Args:
        group: the ranks.
        kinds: of the layers.
        plain: without sequence parallelism.
        calls: of each layer.
        tensor: further settings.

    Returns:
        The candidate of each call, and the selections at the end: as data and as the printed report.
    """
    start(group)
    ranks, rank = group.size(), group.rank()
    data = {kind: make_data(kind, torch.float32, 8 * ranks, ranks, rank, parallel=not plain) for kind in kinds}

    def fresh(kind: str) -> Any:
        return make_layer(kind, torch.float32, sequence_parallel=not plain)

    stock = {kind: step(fresh(kind), *data[kind]) for kind in kinds}
    layers = {kind: fresh(kind) for kind in kinds}
    generator = torch.Generator().manual_seed(rank)
    with few_trials(), enable(config(None, **tensor), strict=True) as session:
        ran = follow(session)
        for _ in range(calls):
            for kind in kinds:
                time.sleep(0.003 * torch.rand((), generator=generator).item())
                layers[kind].zero_grad(set_to_none=True)
                mine = step(layers[kind], *data[kind])
                for name, value in stock[kind].items():
                    what = f"{kind} {name} {ran[-1]}"
                    torch.testing.assert_close(mine[name], value, rtol=2e-5, atol=2e-5, msg=what)
        report = session.report()
    return ran, report.as_dict()["autotuning"], report.render(width=200)


def evaluated(group: dist.ProcessGroup) -> list[dict[str, Any]]:
    """Runs calls without gradients and calls with activation recomputation; the selections at the end."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    with few_trials(), enable(config(None, chunks_per_rank=1), strict=True) as session:
        layer = make_layer("column", torch.float32)
        for _ in range(FEW_CALLS):
            with torch.no_grad():
                layer(x.clone())
        for _ in range(FEW_CALLS):
            step(layer, x, dy, recompute=True)
        lines: list[dict[str, Any]] = session.report().as_dict()["autotuning"]
        return lines


def accumulates(group: dist.ProcessGroup) -> dict[str, str]:
    """A local layer whose weight gradient is added to `main_grad`: what the report excludes."""
    start(group)
    layer = make_layer("column", torch.float32)
    layer.gradient_accumulation_fusion = True
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    with enable(config(None), strict=True) as session:
        step(layer, *make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank()))
        return dict(session.report().not_overlapped)


def recomputed_by_torch(group: dist.ProcessGroup) -> dict[str, str]:
    """`torch.utils.checkpoint` compares what both passes of a layer save: what the report excludes."""
    start(group)
    x, dy = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    layer = make_layer("column", torch.float32)
    with few_trials(), enable(config(None), strict=True) as session:
        for recompute in (False, True):
            for _ in range(FEW_CALLS):
                leaf = x.clone().requires_grad_()
                y = checkpoint(layer, leaf, use_reentrant=False) if recompute else layer(leaf)
                y[0].backward(dy)
        return dict(session.report().not_overlapped)


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
    rounds = patch.object(search, "GAPS", search.GAPS[: search.PROVISIONAL_ROUND + 1])
    with few_trials(), rounds, enable(config(None, chunks_per_rank=1, schedule="direct"), strict=True) as session:
        autotuner: LinearAutotuner = session.adapter(LinearAdapter).autotuner

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
        found = only.search
        while found.measuring:
            run(1)
        found.selected = found.selected._replace(candidate=STOCK)
        run(1)
        ran, calls, counted = follow(session), found.calls, _selected_stock(session)
        run(FREE_CALLS)
        searched, counted, through_run = found.calls - calls, _selected_stock(session) - counted, len(ran)
        others = []
        for case in ("shape", "no gradient", "same input"):
            calls = found.calls
            leaf = x.clone().requires_grad_()
            if case == "shape":
                layer(torch.cat([x, x]))
            elif case == "no gradient":
                with torch.no_grad():
                    layer(x)
            else:
                layer(leaf), other(leaf)
            others.append(found.calls - calls)
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


def groups_made_again(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """A layer runs in training and in evaluation, on groups that are made twice; the selections before and after."""
    from megatron.core import parallel_state

    start(group)
    data = make_data("column", torch.float32, 8 * group.size(), group.size(), group.rank())
    lines = []
    with enable(config(None), strict=True) as session:
        for _ in range(2):
            layer = make_layer("column", torch.float32)
            step(layer, *data)
            with torch.no_grad():
                layer(data[0])
            lines.append([line.passes for line in session.report().autotuning])
            session.drop_adapters()  # as for an in-process restart
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
    return lines[0], lines[1]


def interrupted_recomputation(group: dist.ProcessGroup) -> list[tuple[str, bool]]:
    """The backward of a block in batch overlap ends in an error: split and pause then, a forward or a step later."""
    start(group)
    with enable(config(None), strict=True) as session:
        adapter = session.adapter(LinearAdapter)
        block, found = make_block(group, torch.float32), []
        for later in (lambda: block(hidden_states=torch.ones(2, 2, HIDDEN), attention_mask=None), session.next_step):
            x = torch.ones(1, requires_grad=True)
            x.register_hook(lambda _: 1 / 0)
            output, adapter.autotuner.paused = x * 2, True
            _recompute_with(adapter, "batch", output)
            try:
                output.backward()
            except ZeroDivisionError:
                found.append((adapter.split, adapter.autotuner.paused))
            later()
            found.append((adapter.split, adapter.autotuner.paused))
        return found


@dataclass(frozen=True)
class BlockCase:
    """A block of two transformer layers under `method: auto`.

    Attributes:
        split_us, separate_us: the time of the block in batch overlap and with separate layers, given to the search.
        batch: sequences of the micro-batch.
        last_stage: the block gets its input from `set_input_tensor`, as on a later pipeline stage.
        calls: most calls of the block.
        te: the layers are TransformerEngine's.
        sequence_parallel: rows are sharded.
        recompute: activation recomputation of each layer.
    """

    split_us: float = 100
    separate_us: float = 200
    batch: int = 2
    last_stage: bool = False
    calls: int = 60
    te: bool = False
    sequence_parallel: bool = False
    recompute: bool = False


class BlockRun(NamedTuple):
    """What a block ran.

    Attributes:
        split: for each call, whether the block ran in batch overlap.
        without_selection: for each call, whether a separate layer had no selection yet.
        paused: whether the block was compared before its separate layers were measured to the end.
        timed_outside: steps of the separate layers that were timed after a call in batch overlap.
        lines: the selections.
        not_overlapped: modules of the report that no method overlaps, with the reason.
    """

    split: list[bool]
    without_selection: list[bool]
    paused: bool
    timed_outside: int
    lines: list[dict[str, Any]]
    not_overlapped: dict[str, str]


@contextmanager
def given_times(times_of: Callable[[Search[Candidate]], dict[str, float]]) -> Iterator[None]:
    """Gives a search times by the names of its candidates. A real time that is missing stays missing."""
    record = Search.record

    def record_given(search: Search[Candidate], measured: Sequence[Timing]) -> None:
        given = [Timing(times_of(search)[str(each)]) for each in search.wanted]
        record(search, [m if math.isnan(m.us) else g for m, g in zip(measured, given, strict=True)])

    with patch.object(Search, "record", record_given):
        yield


def block(group: dist.ProcessGroup, case: BlockCase) -> BlockRun:
    """Runs a block until autotuning has selected, and compares each call with the stock path."""
    start(group)
    generator = torch.Generator().manual_seed(31)
    own, rows = (2, 2 * group.size()) if case.sequence_parallel else (SEQUENCE, SEQUENCE)
    x, dy = (torch.randn(own, case.batch, HIDDEN, generator=generator) for _ in range(2))
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    settings: dict[str, Any] = full if case.recompute else {}
    layers = make_block(group, torch.float32, te=case.te, sequence_parallel=case.sequence_parallel, **settings)
    layers.pre_process = not case.last_stage

    def once() -> dict[str, Any]:
        leaf = x.clone().requires_grad_()
        layers.zero_grad(set_to_none=True)
        layers.set_input_tensor(leaf if case.last_stage else None)
        y = layers(hidden_states=None if case.last_stage else leaf, attention_mask=mask)
        y.backward(dy)
        sum_over_rows(layers, group)
        return {"y": y.detach(), "dx": leaf.grad} | {n: p.grad for n, p in layers.named_parameters()}

    times = {"separate layers": case.separate_us, "stock": 20.0, "p2p x 1": 10.0}
    times |= {"batch overlap": case.split_us, "sequence overlap": case.split_us}
    times |= {"p2p direct x 1": 10.0}  # under sequence parallelism

    def times_of(search: Search[Candidate]) -> dict[str, float]:
        # Candidates that are close take more rounds: the first pass of recomputation is measured the longest.
        first = any(kind.search is search and not kind.call.backward for kind in _kinds(session))
        return times | ({"stock": 10.3} if first else {})

    stock = once()
    split, without_selection, paused, timed_outside, left = [], [], False, 0, case.calls
    with (
        one_trial(),
        given_times(times_of),
        enable(config(None, chunks_per_rank=1), strict=True) as session,
    ):
        while left:
            before = _kinds(session)
            linears = [kind for kind in before if kind.call.op != "block"]
            separate = next(iter(linears), None)
            calls = [kind.search.calls for kind in linears]
            mine = once()
            for name, value in stock.items():
                scale = float(value.abs().max())
                torch.testing.assert_close(mine[name], value, rtol=0, atol=1e-5 * scale, msg=f"{name} {split[-1:]}")
            without_selection.append(separate is None or not all(kind.search.has_selection for kind in linears))
            blocks = [kind for kind in _kinds(session) if kind.call.op == "block"]
            split.append(bool(blocks) and blocks[0].step.candidate != SEPARATE_LAYERS)
            compared = bool(blocks) and blocks[0].search.measuring
            paused |= compared and any(kind.search.measuring for kind in linears)
            advanced = [kind.search.calls > number for kind, number in zip(linears, calls, strict=True)]
            assert advanced == [not split[-1] and not compared] * len(linears), "all of them, in one pass only"
            assert session.adapter(LinearAdapter).split == "none", "after a backward pass"
            # With sequence parallelism a layer outside the block is a kind of its own.
            outside = None if case.sequence_parallel else separate
            timed_outside += outside is not None and split[-1] and outside.step.timed
            # The last calls run what is selected.
            left = min(left - 1, 6) if blocks and not blocks[0].search.measuring else left - 1
        report = session.report().as_dict()
    return BlockRun(split, without_selection, paused, timed_outside, report["autotuning"], report["not_overlapped"])


def block_beside_output_layer(group: dist.ProcessGroup) -> tuple[bool, bool]:
    """Whether a block is measured, and then whether a layer outside it, which has run once, is not measured yet."""
    start(group)
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    layers = make_block(group, torch.float32, sequence_parallel=True)
    options = {"bias": False, "gather_output": False, "init_method": torch.nn.init.normal_}
    output = ColumnParallelLinear(HIDDEN, 5 * HIDDEN, config=layers.config, **options)
    times = {"stock": 20.0, "p2p direct x 1": 10.0, "separate layers": 1.0, "batch overlap": 1.0}
    with (
        one_trial(),
        given_times(lambda search: times),
        enable(config(None, chunks_per_rank=1), strict=True) as session,
    ):
        for number in range(60):
            y = layers(hidden_states=torch.randn(2, 2, HIDDEN, requires_grad=True), attention_mask=None)
            (output(y)[0] if number == 0 else y).sum().backward()
            if any(kind.call.op == "block" for kind in _kinds(session)):
                break
        kinds = _kinds(session)
    outside = [kind for kind in kinds if kind.call.out_features == 5 * HIDDEN // group.size()]
    return any(kind.call.op == "block" for kind in kinds), outside[0].search.measuring


def _kinds(session: Session) -> list[Kind]:
    return [
        kind for each in session.adapter(LinearAdapter).autotuner._autotuners.values() for kind in each.kinds.values()
    ]
