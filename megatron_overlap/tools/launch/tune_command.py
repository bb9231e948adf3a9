"""`megatron-overlap tune`: fill the autotuning cache with a short run of the same job."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from megatron_overlap.autotune.candidates import KNOBS
from megatron_overlap.autotune.predict import MAX_TRIED
from megatron_overlap.autotune.search import calls_to_choose
from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config
from megatron_overlap.config.resources import config_file
from megatron_overlap.counters import AutotuneLine
from megatron_overlap.session_report import autotune_table
from megatron_overlap.tools.launch.command import iteration_of, new_run_dir, require_shared_options
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import execute, plan
from megatron_overlap.tools.launch.processes import RunError

_FIRST_STEPS = 2
_KNOBS = sum(len(values) - 1 for values in KNOBS.values())
# Margin for measurements that need more passes than planned.
_MARGIN = 1.1


def tune(
    config: Annotated[Path, typer.Argument(help="Launch config: a YAML file, or the name of a shipped one.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value; overrides the file.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="Folder of this run. Default: a new folder in launch.output_dir.")
    ] = None,
    rendezvous: Annotated[
        str | None, typer.Option("--rendezvous", help="HOST:PORT of the first node. Required with several nodes.")
    ] = None,
) -> int:
    """Measure the fastest method of each layer and cache it for later runs."""
    config = config_file(config)
    cfg = short_run(str(config), load_launch_config(config, overrides or ()))
    if cfg.launch.nodes > 1:
        require_shared_options("tune", rendezvous, run_dir, cfg.launch.nodes)
    folder = run_dir if run_dir is not None else new_run_dir(cfg)
    # Rich wraps at 80 columns if the output is not a terminal.
    console = Console(width=None if sys.stdout.isatty() else 150, markup=False)
    try:
        with _bar(console) as progress:
            task = progress.add_task(cfg.name, total=cfg.train.iterations)

            def on_line(rank: int, line: str) -> None:
                done = iteration_of(line)
                if done is not None:
                    progress.update(task, completed=done)

            execute(plan(cfg, folder, rendezvous=rendezvous), on_line=on_line, on_note=console.print)
    except (RunError, NetlabError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    choices = read_choices(folder)
    console.print(autotune_table(choices))
    undone = sum(choice.ms is None for choice in choices)
    if undone or not choices:
        print(f"{cfg.name}: {undone} of {len(choices)} kinds of calls were not measured; see {folder}", file=sys.stderr)
        return 1
    console.print(f"{cfg.name}: {len(choices)} choices are kept in {cfg.overlap.tensor.autotune_cache}")
    return 0


def short_run(name: str, cfg: LaunchConfig) -> LaunchConfig:
    """The same job, as long as it takes to choose, with nothing saved and nothing evaluated.

    Args:
        name: of the config, for errors.
        cfg: any launch config.

    Raises:
        ConfigError: there is nothing to choose, or nowhere to keep it.
    """
    tensor = cfg.overlap.tensor
    if cfg.parallel.tensor == 1:
        raise ConfigError(name, "parallel.tensor", 1, "there is nothing to choose without tensor parallel ranks")
    if tensor.method != "auto":
        raise ConfigError(
            name, "overlap.tensor.method", tensor.method, "tune needs auto: add overlap.tensor.method=auto"
        )
    if tensor.autotune_cache is None:
        raise ConfigError(name, "overlap.tensor.autotune_cache", None, "name a folder")
    # The output layer is called once a micro-batch, all others once a layer and micro-batch. Where there are fused
    # kernels their variants are tried in the layers; the output layer may end with fewer of them tried.
    near = _KNOBS if cfg.launch.device == "cuda" else 0
    layers = cfg.model.num_layers // cfg.parallel.pipeline
    calls = max(calls_to_choose(1 + MAX_TRIED), calls_to_choose(1 + MAX_TRIED, near) / layers)
    iterations = _FIRST_STEPS + math.ceil(_MARGIN * calls / cfg.num_microbatches)
    dump = cfg.model_dump()
    train = {
        "iterations": max(iterations, cfg.train.lr_warmup_iterations + 1),
        "eval_iterations": 0,
        "save": None,
        "save_interval": None,
    }
    return LaunchConfig.model_validate({**dump, "name": f"{cfg.name}_tune", "train": {**dump["train"], **train}})


def read_choices(run_dir: Path) -> list[AutotuneLine]:
    """What the ranks of a run have chosen: each kind of call once, by the first rank that had it."""
    found: dict[tuple[Any, ...], AutotuneLine] = {}
    for path in sorted(run_dir.glob("report-rank*.json")):
        for tree in json.loads(path.read_text(encoding="utf-8")).get("autotuning", ()):
            line = AutotuneLine(**{name: value for name, value in tree.items() if name != "gain"})
            found.setdefault((line.module, line.op, line.rows, line.dtype, line.passes), line)
    return list(found.values())


def _bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    return Progress(*columns, TimeElapsedColumn(), console=console)
