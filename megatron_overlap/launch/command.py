"""`megatron-overlap launch`: runs a launch config, or prints what it would run."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config
from megatron_overlap.launch.execute import execute
from megatron_overlap.launch.netlab import NetlabError
from megatron_overlap.launch.outcome import RunError
from megatron_overlap.launch.plan import plan
from megatron_overlap.launch.progress import show


def launch(
    config: Annotated[Path, typer.Argument(help="Launch config (YAML).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, over what the file says.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of this run; else a new one in launch.output_dir.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT of the first node, for several nodes.")
    ] = None,
) -> int:
    """Run a launch config."""
    cfg = load_launch_config(config, overrides or (), inputs=not dry_run)
    if cfg.launch.nodes > 1 and not dry_run:
        _need_one_place(rendezvous, run_dir, cfg.launch.nodes)
    folder = run_dir if run_dir is not None else new_run_dir(cfg)
    try:
        launch_plan = plan(cfg, folder, rendezvous=rendezvous)
    except ConfigError as error:  # a plan does not know which file its config came from
        raise ConfigError(str(config), error.key, error.value, error.remedy) from error
    if dry_run:
        print(launch_plan.render())
        return 0
    print(
        f"{cfg.name}: {len(launch_plan.commands)} processes, {launch_plan.link}; logs: {launch_plan.log_dir}",
        flush=True,
    )
    try:
        result = execute(launch_plan, on_line=_Progress(cfg), on_note=_note)
    except (RunError, NetlabError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{cfg.name}: interrupted; all ranks ended", file=sys.stderr)
        return 130
    print(f"{cfg.name}: done after {result.wall_s:.1f} s; run directory: {folder}")
    return 0


def new_run_dir(cfg: LaunchConfig) -> Path:
    """A name in `launch.output_dir` that nothing has yet: the config's name and the time."""
    stem = Path(cfg.launch.output_dir) / f"{cfg.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 2
    while folder.exists():
        folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return folder


def _need_one_place(rendezvous: str | None, run_dir: Path | None, nodes: int) -> None:
    """Several nodes must agree on where they meet and what the run is called."""
    for option, value, what in (
        ("--rendezvous", rendezvous, "HOST:PORT of the first node"),
        ("--run-dir", run_dir, "a folder that all nodes share"),
    ):
        if value is None:
            remedy = f"launch.nodes is {nodes}: give {what}, the same on every node"
            raise ConfigError("command line", f"launch {option}", None, remedy)


class _Progress:
    """Prints what is worth it: the plugin's report from rank 0, the iterations from whichever rank logs them."""

    def __init__(self, cfg: LaunchConfig) -> None:
        self._ranks = {0, cfg.world_size - 1}

    def __call__(self, rank: int, line: str) -> None:
        text = show(line) if rank in self._ranks else None
        if text is not None:
            print(text, flush=True)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr, flush=True)
