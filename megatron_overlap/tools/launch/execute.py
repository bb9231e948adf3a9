"""Carries out a launch plan: makes the run directory and the hosts, runs the ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from megatron_overlap.config import dump_config
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import LaunchPlan, over_loopback, plan
from megatron_overlap.tools.launch.processes import run_ranks
from megatron_overlap.tools.launch.results import OnLine, RunResult


def execute(
    launch_plan: LaunchPlan,
    *,
    on_line: OnLine | None = None,
    on_note: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Runs a plan to its end.

    Where `launch.hosts` cannot be made on this machine and its `fallback` is `loopback`, the ranks run over
    loopback; the run directory's config then says so, as it has no hosts.

    Args:
        launch_plan: what to do.
        on_line: called with (rank, line).
        on_note: called with what a person should know, such as the fallback.

    Raises:
        NetlabError: the hosts cannot be made; nothing was started.
        RankFailed, RunTimeout: see `run_ranks`.
    """
    lab, hosts = launch_plan.lab, launch_plan.config.launch.hosts
    if lab is None or hosts is None:
        return _run(launch_plan, on_line)
    try:
        lab.open()
    except NetlabError as error:
        if hosts.fallback != "loopback":
            raise NetlabError(f"{error}; launch.hosts.fallback=loopback runs without limited links") from error
        on_note(f"no hosts on this machine: {error}; running over loopback, its rate is not limited")
        return _run(plan(over_loopback(launch_plan.config), launch_plan.run_dir), on_line)
    with contextlib.closing(lab):
        commands = [
            dataclasses.replace(command, argv=lab.wrap(lab.host_of(command.rank), command.argv))
            for command in launch_plan.commands
        ]
        return _run(dataclasses.replace(launch_plan, commands=tuple(commands)), on_line)


def _run(launch_plan: LaunchPlan, on_line: OnLine | None) -> RunResult:
    launch_plan.run_dir.mkdir(parents=True, exist_ok=True)
    _write(launch_plan.config_path, dump_config(launch_plan.config))
    return run_ranks(
        launch_plan.commands,
        timeout_s=launch_plan.config.launch.timeout_s,
        log_dir=launch_plan.log_dir,
        on_line=on_line,
    )


def _write(path: Path, text: str) -> None:
    # Several nodes may write the same file of a shared folder: each reader must see all of it.
    number, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(number, "w") as file:
        file.write(text)
    os.replace(name, path)
