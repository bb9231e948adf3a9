"""Worker functions of test_forward_only.py: Megatron's linear layers without a backward pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.adapters.tensor_parallel import autotune, forward_only
from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
from megatron_overlap.autotune import search, tuner
from megatron_overlap.autotune.candidates import STOCK
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.session import Session
from tests.adapters.tensor_parallel.autotune_workers import config, follow
from tests.adapters.tensor_parallel.linear_workers import IN, OUT, make_data, make_layer, start, step
from tests.autotune.trials import few_trials

TRIAL_CALLS, RECHECK = 3, 2
THRESHOLD = 64


class Counts(NamedTuple):
    """The calls of one operation and direction: overlapped, stock path by autotuning, not communicating."""

    overlapped: int
    stock: int
    not_communicating: int
    moved_bytes: int


def counts(session: Session) -> dict[tuple[str, str], Counts]:
    return {
        (site.op, site.direction): Counts(t.overlapped, t.stock_selected, t.not_communicating, t.moved_bytes)
        for site, t in session.report().sites.items()
    }


@contextmanager
def threshold(rows: float) -> Iterator[None]:
    """The cost model returns `rows` for every kind of layer."""
    with patch.object(forward_only, "min_rows", lambda *_: rows):
        yield


def close(mine: torch.Tensor, stock: torch.Tensor) -> None:
    torch.testing.assert_close(mine, stock, rtol=2e-5, atol=2e-5)


def sizes(
    group: dist.ProcessGroup, kind: str, plain: bool, rows: list[int], how: str
) -> tuple[list[str], dict[tuple[str, str], Counts], int, int]:
    """Runs calls of so many gathered rows without a backward pass, and compares them with the stock path.

    Args:
        group: the ranks.
        kind: of the layer.
        plain: without sequence parallelism.
        rows: of the calls; the batch has two sequences.
        how: `no_grad`, `inference_mode`, or `frozen`: gradients are enabled but no tensor requires one.

    Returns:
        The candidate of each call that ran through the autotuner, the counts, the number of autotuned kinds, and how
        often candidates were listed.
    """
    start(group)
    layer = make_layer(kind, torch.float32, sequence_parallel=not plain)
    if how == "frozen":
        layer.requires_grad_(False)
    context = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(how, torch.enable_grad)
    inputs = [make_data(kind, torch.float32, n // 2, group.size(), group.rank(), not plain)[0] for n in rows]
    with context():
        stock = [layer(x)[0] for x in inputs]
    listing = patch.object(autotune, "p2p_settings", wraps=autotune.p2p_settings)
    with threshold(THRESHOLD), listing as listed, enable(config(None), strict=True) as session:
        ran = follow(session)
        with context():
            for x, expected in zip(inputs, stock, strict=True):
                close(layer(x)[0], expected)
        autotuners = session.adapter(LinearAdapter).autotuner._autotuners.values()
        return ran, counts(session), sum(len(each.kinds) for each in autotuners), listed.call_count


def repeated(group: dist.ProcessGroup, stock_wins: bool) -> tuple[list[str], list[dict[str, Any]], list[str]]:
    """Runs one number of rows above the threshold until it is measured, then fewer and more rows.

    Returns:
        The candidates of the repeated calls, the report's lines, and the candidates of the calls with other rows.
    """
    start(group)
    layer = make_layer("row", torch.float32)

    def data(rows: int) -> torch.Tensor:
        made: torch.Tensor = make_data("row", torch.float32, rows // 2, group.size(), group.rank())[0]
        return made

    x, fewer, more = data(2 * THRESHOLD), data(2 * THRESHOLD - 2 * group.size()), data(4 * THRESHOLD)
    record = search.Search.record

    def record_given(self: Any, times: Any) -> None:
        record(self, [search.Timing(10.0 if (each == STOCK) == stock_wins else 20.0) for each in self.wanted])

    with (
        threshold(THRESHOLD),
        patch.object(forward_only, "TRIAL_CALLS", TRIAL_CALLS),
        patch.object(search, "CACHED_RECHECK", RECHECK),
        few_trials(),
        patch.object(search.Search, "record", record_given),
        enable(config(None, chunks_per_rank=1, schedule="direct"), strict=True) as session,
        torch.no_grad(),
    ):
        ran = follow(session)
        for _ in range(80):
            layer(x)
        repeats = list(ran)
        for each in (fewer, more):
            layer(each)
        return repeats, session.report().as_dict()["autotuning"], ran[len(repeats) :]


def measures(group: dist.ProcessGroup) -> list[tuple[str, float, float, float, float, float]]:
    """The first calls of three layers measure link and GEMM; the thresholds and what they rest on, on this rank."""
    start(group)
    with enable(config(None), strict=True) as session, torch.no_grad():
        for kind, plain in (("column", False), ("row", False), ("row", True)):
            layer = make_layer(kind, torch.float32, sequence_parallel=not plain)
            layer(make_data(kind, torch.float32, 8 * group.size(), group.size(), group.rank(), not plain)[0])
        found = session.adapter(LinearAdapter).autotuner._forward_only._thresholds.values()
        return [
            (t.call.op, t.rows, t.stock.latency_us, t.stock.bytes_per_us, t.gemm.fixed_us, t.p2p.latency_us)
            for t in found
        ]


def measured_messages(group: dist.ProcessGroup) -> dict[str, int]:
    """How often the first calls of three layers communicate by p2p to measure the link."""
    start(group)
    begun: Counter[str] = Counter()
    begin = GlooTransport.begin

    def counted(transport: GlooTransport, transfers: Any, op: str) -> Any:
        begun[op] += 1
        return begin(transport, transfers, op)

    with (
        threshold(math.inf),
        patch.object(GlooTransport, "begin", counted),
        enable(config(None), strict=True),
        torch.no_grad(),
    ):
        for kind, plain in (("column", False), ("row", False), ("row", True)):
            layer = make_layer(kind, torch.float32, sequence_parallel=not plain)
            layer(make_data(kind, torch.float32, 8 * group.size(), group.size(), group.rank(), not plain)[0])
    return dict(begun)


def apart(group: dist.ProcessGroup, method: str, plain: bool) -> dict[tuple[str, str], Counts]:
    """Three forward-only calls of two layers, and two training steps, one of them with recomputation."""
    start(group)
    with enable(OverlapConfig(tensor={"method": method}), strict=True) as session:
        for kind in ("column", "row"):
            layer = make_layer(kind, torch.float32, sequence_parallel=not plain)
            x, dy = make_data(kind, torch.float32, 4 * group.size(), group.size(), group.rank(), not plain)
            with torch.no_grad():
                for _ in range(3):
                    layer(x)
            step(layer, x, dy)
            step(layer, x, dy, recompute=True)
        return counts(session)


def silent_layer(group: dist.ProcessGroup) -> dict[tuple[str, str], Counts]:
    """A column-parallel layer whose sequence parallelism is switched off for one call, as for last-token logits."""
    start(group)
    layer = make_layer("column", torch.float32)
    x = torch.randn(3, 2, IN, generator=torch.Generator().manual_seed(1))
    layer.sequence_parallel = False
    with enable(OverlapConfig(tensor={"method": "p2p"}), strict=True) as session:
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                y = layer(x)[0]
            close(y, x @ layer.weight.t() + layer.bias)
            assert y.shape[-1] == OUT // group.size()
        return counts(session)


def other_tuner(group: dist.ProcessGroup) -> int:
    """Decode calls of a layer after the first one: how often its autotuner runs or exchanges anything."""
    start(group)
    layer = make_layer("row", torch.float32)
    x = make_data("row", torch.float32, group.size(), group.size(), group.rank())[0]
    with threshold(THRESHOLD), enable(config(None), strict=True) as session, torch.no_grad():
        layer(x)
        ran = follow(session)
        with patch.object(tuner.HostGroup, "_all_gather", side_effect=AssertionError):
            for _ in range(20):
                layer(x)
        return len(ran)
