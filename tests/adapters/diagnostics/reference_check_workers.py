"""What the workers run in tests of check mode: Megatron's own layers, checked while they train."""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel import linear_workers
from tests.helpers.faulty import CorruptTransport

RESULTS = ("y", "dx", "dw", "dbias")


def checked(
    group: dist.ProcessGroup,
    kind: str,
    dtype: torch.dtype,
    *,
    plain: bool = False,
    fused: bool = False,
    recompute: bool = False,
    corrupt: str | None = None,
    check: dict[str, Any] | None = None,
    steps: int = 1,
) -> dict[str, Any]:
    """Steps of one layer in check mode: what was compared, what was said, and whether the results are stock's.

    Args:
        corrupt: op whose messages are corrupted.
        check: the config's section.
        steps: of which every second is checked, the second first.
    """
    from megatron.core import parallel_state

    linear_workers.start(group)
    ranks, rank = group.size(), group.rank()
    x, dy = linear_workers.make_data(kind, dtype, 3 * ranks, ranks, rank, parallel=not plain)
    made = {"sequence_parallel": not plain}

    def fresh() -> Any:
        layer = linear_workers.make_layer(kind, dtype, **made)
        if fused:
            layer.gradient_accumulation_fusion = True
            layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float32)
            layer.weight.grad_added_to_main_grad = False
        return layer

    stock = linear_workers.step(linear_workers.make_layer(kind, dtype, **made), x, dy)
    bad: CorruptTransport | None = None
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    if corrupt is not None:
        bad = CorruptTransport(tensor_group, op=corrupt)
    config = {"tensor": linear_workers.TENSOR, "check": {"every": 2, **(check or {})}}
    said, error, got = io.StringIO(), "", {}
    with enable(OverlapConfig.model_validate(config)) as session:
        if bad is not None:
            session.transports.insert(tensor_group, bad)
        with contextlib.redirect_stdout(said):
            for _ in range(2 * steps):
                session.next_step()
                layer = fresh()
                try:
                    got = linear_workers.step(layer, x, dy, recompute=recompute)
                except ValueError as raised:
                    error = f"{type(raised).__name__}: {raised}"
                    break
            session.next_step()
        if fused:
            got["dw"] = layer.weight.main_grad.to(dtype)
        report = session.report()
    reasons = {reason: n for tally in report.sites.values() for reason, n in tally.fallbacks.items()}
    share = 1e-4 if dtype == torch.float32 else 2e-2
    close = not error and all(
        (got[name].float() - stock[name].float()).abs().max() <= share * stock[name].float().abs().max()
        for name in RESULTS
        if stock[name] is not None
    )
    return {
        "checked": dict(report.numerics_check),
        "said": said.getvalue(),
        "error": error,
        "reasons": reasons,
        "close": close,
        "overlapped": sum(tally.overlapped for tally in report.sites.values()),
        "corrupted": bad is not None and bad.corrupted > 0,
    }


def unchecked_costs_nothing(group: dist.ProcessGroup) -> tuple[list[int], list[str]]:
    """Before the first step, in a step that is not checked, and in one that is.

    Returns:
        The collectives of the process group, and why nothing has been compared.
    """
    from unittest import mock

    linear_workers.start(group)
    x, dy = linear_workers.make_data("column", torch.float32, 3 * group.size(), group.size(), group.rank())
    counts, reasons = [], []
    with enable(OverlapConfig.model_validate({"tensor": linear_workers.TENSOR, "check": {"every": 2}})) as session:
        for step in range(3):
            if step:
                session.next_step()
            with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as counted:
                linear_workers.step(linear_workers.make_layer("column", torch.float32), x, dy)
            counts.append(counted.call_count)
            reasons.append(session.report().unchecked)
    return counts, reasons


def without_gradients(group: dist.ProcessGroup, kind: str) -> list[str]:
    """Checks a call under `no_grad` and one in inference mode; the names of what was compared."""
    linear_workers.start(group)
    layer = linear_workers.make_layer(kind, torch.float32)
    x, _ = linear_workers.make_data(kind, torch.float32, 8, group.size(), group.rank())
    config = OverlapConfig.model_validate({"tensor": linear_workers.TENSOR, "check": {"every": 1}})
    with enable(config, strict=True) as session:
        session.next_step()
        for context in (torch.no_grad(), torch.inference_mode()):
            with context:
                layer(x)
        return list(session.report().numerics_check)


def disagreeing(group: dist.ProcessGroup, other: dict[str, Any]) -> str:
    """The last rank enables another config; what each is told, and Megatron is as it was."""
    from megatron.core.tensor_parallel.layers import RowParallelLinear

    linear_workers.start(group)
    before = RowParallelLinear.forward
    config = other if group.rank() == group.size() - 1 else {"tensor": linear_workers.TENSOR}
    text = ""
    try:
        enable(OverlapConfig.model_validate(config))
    except ValueError as error:
        text = f"{type(error).__name__}: {error}"
    assert RowParallelLinear.forward is before
    return text


def under_arguments(group: dist.ProcessGroup, seq_length: int | None, micro_batch_size: int | None) -> str:
    """What `enable` says under Megatron's arguments of these sizes; four chunks a rank are asked for."""
    from megatron.training import global_vars

    linear_workers.start(group)
    global_vars._GLOBAL_ARGS = argparse.Namespace(seq_length=seq_length, micro_batch_size=micro_batch_size)
    try:
        enable(OverlapConfig.model_validate({"tensor": {"method": "p2p", "chunks_per_rank": 4}})).disable()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        global_vars._GLOBAL_ARGS = None
    return ""


def made_again(group: dist.ProcessGroup) -> tuple[int, bool]:
    """Megatron's groups are made twice in a session: wrappers around its step, and whether it is its own after."""
    from megatron.core import parallel_state
    from megatron.training import training

    linear_workers.start(group)
    before = training.train_step
    parallel_state.destroy_model_parallel()
    with enable(OverlapConfig.model_validate({"tensor": linear_workers.TENSOR})):
        for _ in range(2):
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=group.size())
        step, wrappers = training.train_step, 0
        while step is not before:
            step, wrappers = step.__wrapped__, wrappers + 1
    return wrappers, training.train_step is before


def restarted_in_process(group: dist.ProcessGroup, store: Path) -> dict[str, Any]:
    """A step, one that rank 1 does not take part in, then groups made anew in the same processes, and a step.

    Returns:
        What the second step ended with on rank 0, whether the last equals stock's, and the threads that are left.
    """
    from megatron.core import parallel_state

    linear_workers.start(group)
    rank, ranks = group.rank(), group.size()
    x, dy = linear_workers.make_data("column", torch.float32, 4 * ranks, ranks, rank)
    found: dict[str, Any] = {"failed": ""}
    with enable(OverlapConfig.model_validate({"tensor": linear_workers.TENSOR, "timeout_s": 2.0})) as session:
        session.folder = Path(tempfile.mkdtemp())
        linear_workers.step(linear_workers.make_layer("column", torch.float32), x, dy)
        if rank == 0:
            try:
                linear_workers.step(linear_workers.make_layer("column", torch.float32), x, dy)
            except RuntimeError as error:
                found["failed"] = f"{type(error).__name__}: {error}"
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
        dist.init_process_group(
            "gloo", init_method=store.as_uri(), rank=rank, world_size=ranks, timeout=timedelta(seconds=20)
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
        second = linear_workers.step(linear_workers.make_layer("column", torch.float32), x, dy)
        found["overlapped"] = session.report().as_dict()["totals"]["overlapped"]
        found["threads"] = sorted(each.name for each in threading.enumerate() if "megatron_overlap" in each.name)
        found["written"] = [path.name for path in session.folder.iterdir()]
        shutil.rmtree(session.folder)
    stock = linear_workers.step(linear_workers.make_layer("column", torch.float32), x, dy)
    found["equal"] = all(torch.allclose(second[name], stock[name], rtol=1e-5, atol=1e-5) for name in RESULTS)
    return found
