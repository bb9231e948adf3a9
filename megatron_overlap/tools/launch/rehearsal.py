"""Rehearsal of a launch: run its downscaled config on CPUs with and without the overlap and compare both runs."""

import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from rich.table import Table

from megatron_overlap.config import LaunchConfig, to_megatron_args, without_overlap
from megatron_overlap.patching.manifest import Permit, load_permits
from megatron_overlap.tools.launch.plan import execute, gpu_env, plan
from megatron_overlap.tools.launch.processes import RunError, run_ranks, worker_commands
from megatron_overlap.tools.launch.run_records import RunRecord, deviation, read_run

# Largest relative deviation from the stock path over the steps, (loss, grad-norm). fp32: the sums have another order,
# see docs/numerics.md. bf16: one eps for the loss, which is a mean over tokens. Grad-norm: the stock path in bf16
# deviates by 1.6e-2 from fp32, so a smaller bound would fail by rounding. `train.precision=fp32` is the sharper test.
BOUNDS = {"fp32": (1e-5, 1e-5), "bf16": (2.0**-8, 2e-2)}
_RANK_BYTES = 1.2e9  # resident memory of one rank: torch, Megatron and a tiny model


def max_local_ranks() -> int:
    """Largest number of rehearsal ranks on this machine: limited by free memory and by two ranks per core."""
    by_memory = int(psutil.virtual_memory().available / _RANK_BYTES)
    return max(2, min(by_memory, 2 * len(os.sched_getaffinity(0)), 8))


@dataclass(frozen=True)
class Rehearsal:
    """Both runs of a downscaled config; the same run twice if the config has no overlap."""

    stock: RunRecord
    overlapped: RunRecord
    config: LaunchConfig

    @property
    def columns(self) -> tuple[tuple[str, float, list[tuple[float | None, float | None]]], ...]:
        """Loss and grad-norm: name, largest deviation, and (stock, overlap) of each step; None: not recorded."""
        losses = list(zip(self.stock.losses, self.overlapped.losses, strict=True))
        grad_norms = list(zip(self.stock.grad_norms, self.overlapped.grad_norms, strict=True))
        loss_bound, grad_norm_bound = BOUNDS[self.config.train.precision]
        return ("loss", loss_bound, losses), ("grad-norm", grad_norm_bound, grad_norms)

    @property
    def failures(self) -> list[str]:
        """Reasons why the rehearsal failed: a deviation, or no call was overlapped; empty if it passed."""
        failures = []
        for index, iteration in enumerate(self.overlapped.iterations):
            for name, bound, pairs in self.columns:
                difference, shown = deviation(*pairs[index]), " and ".join(map(_number, pairs[index]))
                if not difference <= bound:  # NaN fails too
                    what = f"{name} {shown}: difference {difference:.1e}, at most {bound:.1e}"
                    failures.append(f"step {iteration}: {what}")
        report, config = self.overlapped.report, self.config
        sizes = {"tensor": config.parallel.tensor, "expert": config.expert_parallel_size}
        on = [name for name, size in sizes.items() if size > 1 and getattr(config.overlap, name).method != "none"]
        if on and (report is None or not report.overlapped_calls):
            failures.append(f"overlap.{on[0]} is on, but no call was overlapped")
        return failures


def rehearse(
    cfg: LaunchConfig,
    downscaled: LaunchConfig,
    folder: Path,
    on_start: Callable[[LaunchConfig], None] = lambda config: None,
) -> Rehearsal:
    """Check the arguments of a launch on GPUs, run its downscaled config with and without the overlap, and compare.

    A config without overlap runs once, and its losses must be finite. `downscaled` is the result of `downscale` for
    `cfg`, `folder` the parent of the run directories. `on_start` is called with a config before its run.

    Raises:
        RunError: Megatron refuses the arguments of the launch, or a rank failed.
        RunRecordError: a run directory is incomplete.
    """
    stock = without_overlap(downscaled)
    configs = [stock, downscaled] if stock.overlap != downscaled.overlap else [downscaled]
    records = []
    try:
        if cfg.launch.device == "cuda":
            check_arguments(cfg, folder / "arguments")
        for config in configs:
            on_start(config)
            planned = plan(config, folder / config.name)
            execute(planned)
            records.append(read_run(planned.run_dir, config.world_size, config.train.iterations))
    except RunError as error:
        for permit in load_permits():
            if permit.remedy and re.search(permit.without, str(error)):
                raise RunError(f"{error}\na GPU refuses it too ({permit.on_gpu}): {permit.remedy}") from error
        raise
    return Rehearsal(records[0], records[-1], downscaled)


def check_arguments(cfg: LaunchConfig, log_dir: Path) -> None:
    """Pass the arguments of the launch, at its number of ranks, through Megatron's validation.

    Raises RunError if Megatron refuses them.
    """
    code = "from megatron_overlap.adapters.training.bootstrap import validate_arguments; validate_arguments()"
    (command,) = worker_commands([sys.executable, "-c", code, *to_megatron_args(cfg)], 1)
    env = {**command.env, **gpu_env(cfg), "WORLD_SIZE": str(cfg.world_size)}
    run_ranks([replace(command, env=env)], timeout_s=cfg.launch.timeout_s, log_dir=log_dir)


def permits_table(permits: Iterable[Permit]) -> Table:
    """What CPU ranks permit and a GPU does not, as a table."""
    table = Table("CPU ranks", "GPU", title="differs from a launch on GPUs", title_justify="left", expand=False)
    for permit in permits:
        table.add_row(permit.what, permit.on_gpu)
    return table


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.7g}"
