"""`megatron-overlap launch`: runs a launch config, or prints what it would run."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config, without_overlap
from megatron_overlap.config.resources import config_file
from megatron_overlap.tools.launch.downscale import fold
from megatron_overlap.tools.launch.execute import execute
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import plan
from megatron_overlap.tools.launch.progress import show
from megatron_overlap.tools.launch.rehearsal import folding_table, ranks_here, steps_table
from megatron_overlap.tools.launch.rehearsal import rehearse as run_rehearsal
from megatron_overlap.tools.launch.results import RunError
from megatron_overlap.tools.launch.run_records import ArtefactError
from megatron_overlap.tools.launch.slurm import batch_file


def launch(
    config: Annotated[Path, typer.Argument(help="Launch config: a YAML file, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, over what the file says.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and start nothing.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of this run; else a new one in launch.output_dir.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT of the first node, for several nodes.")
    ] = None,
    rehearse: Annotated[
        bool,
        typer.Option(
            "--rehearse", help="Run it folded on the CPUs of this machine, and compare it with stock Megatron."
        ),
    ] = False,
    rehearse_ranks: Annotated[
        int | None,
        typer.Option("--rehearse-ranks", min=1, help="Ranks of the rehearsal, if not what suits the machine."),
    ] = None,
    emit_slurm: Annotated[
        bool,
        typer.Option("--emit-slurm", help="Write a Slurm batch file to the FILE named after it, or to the terminal."),
    ] = False,
    baseline: Annotated[
        str | None,
        typer.Option(
            "--baseline",
            help="With --emit-slurm: make a job array of this config (`self`: the same without overlap) and CONFIG.",
        ),
    ] = None,
) -> int:
    """Run a launch config."""
    config = config_file(config)
    if emit_slurm:
        return _emit_slurm(config, overrides or [], baseline)
    if baseline is not None:
        remedy = "needs --emit-slurm; to run both here: megatron-overlap compare CONFIG"
        raise ConfigError("command line", "launch --baseline", baseline, remedy)
    if rehearse:
        return _rehearse(config, overrides or (), run_dir, rehearse_ranks)
    if rehearse_ranks is not None:
        raise ConfigError("command line", "launch --rehearse-ranks", rehearse_ranks, "needs --rehearse")
    cfg = load_launch_config(config, overrides or (), inputs=not dry_run)
    if cfg.launch.nodes > 1 and not dry_run:
        need_one_place("launch", rendezvous, run_dir, cfg.launch.nodes)
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


def _rehearse(config: Path, overrides: Sequence[str], run_dir: Path | None, max_ranks: int | None) -> int:
    """Folds, runs with and without the overlap, prints what was folded and the verdict."""
    cfg = load_launch_config(config, overrides)
    folded, changes = fold(cfg, max_ranks or ranks_here())
    folder = run_dir if run_dir is not None else new_run_dir(folded)
    # Rich would cut words at 80 columns where the output is not a terminal.
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    console.print(folding_table(changes))
    try:
        result = run_rehearsal(folded, folder, lambda started: print(f"{started.name}: {folder}", flush=True))
    except (RunError, ArtefactError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    console.print(steps_table(result))
    for left in result.report.fallbacks if result.report is not None else ():
        print(f"Megatron's own path: {left.module}: {left.op} {left.direction}: {left.calls} calls: {left.reason}")
    for failure in result.failures:
        print(f"{cfg.name}: {failure}", file=sys.stderr)
    calls = f"{result.report.overlapped_calls} calls overlapped" if result.report is not None else "the plugin was off"
    print(f"{cfg.name}: rehearsal {'FAILED' if result.failures else 'passed'}: {calls}")
    return 1 if result.failures else 0


def _emit_slurm(config: Path, arguments: list[str], baseline: str | None) -> int:
    """Writes the batch file; what is no override among the arguments is its name."""
    files = [text for text in arguments if "=" not in text]
    overrides = [text for text in arguments if "=" in text]
    if len(files) > 1:
        raise ConfigError("command line", "launch --emit-slurm", " ".join(files), "name one file, or none")
    configs = [load_launch_config(config, overrides)]
    if baseline == "self":
        configs.insert(0, without_overlap(configs[0]))
    elif baseline is not None:
        configs.insert(0, load_launch_config(config_file(baseline), overrides))
        if configs[0].name == configs[1].name:
            raise ConfigError(
                baseline, "name", configs[0].name, f"must differ from that of {config}: it names a folder"
            )
    text = batch_file(configs, files[0] if files else "FILE")
    if not files:
        print(text, end="")
        return 0
    try:
        Path(files[0]).write_text(text, encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or "cannot be written").lower()
        raise ConfigError("command line", "launch --emit-slurm", files[0], f"{reason}; name a file to write") from error
    print(f"{files[0]}: {len(configs)} run(s) on {configs[0].launch.nodes} node(s); submit it with: sbatch {files[0]}")
    return 0


def new_run_dir(cfg: LaunchConfig) -> Path:
    """A name in `launch.output_dir` that nothing has yet: the config's name and the time."""
    stem = Path(cfg.launch.output_dir) / f"{cfg.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 2
    while folder.exists():
        folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return folder


def need_one_place(command: str, rendezvous: str | None, run_dir: Path | None, nodes: int) -> None:
    """Several nodes must agree on where they meet and what the run is called."""
    for option, value, what in (
        ("--rendezvous", rendezvous, "HOST:PORT of the first node"),
        ("--run-dir", run_dir, "a folder that all nodes share"),
    ):
        if value is None:
            remedy = f"launch.nodes is {nodes}: give {what}, the same on every node"
            raise ConfigError("command line", f"{command} {option}", None, remedy)


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
