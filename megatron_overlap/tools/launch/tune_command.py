"""`megatron-overlap tune`: fill the autotuning cache with a short run of the same job."""

import json
import math
import sys
from pathlib import Path
from typing import Any

from megatron_overlap.autotune.search import calls_to_select
from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config
from megatron_overlap.config.resources import config_file
from megatron_overlap.counters import AutotuneLine
from megatron_overlap.schedules.heuristics import KNOBS, max_p2p_settings
from megatron_overlap.session_report import autotune_table
from megatron_overlap.tools.launch.command import (
    Config,
    Overrides,
    Rendezvous,
    RunDir,
    iterations_in,
    require_shared_options,
    wide_console,
)
from megatron_overlap.tools.launch.netlab import NetlabError
from megatron_overlap.tools.launch.plan import execute, plan, unused_folder
from megatron_overlap.tools.launch.processes import RunError

_FIRST_STEPS = 2
_NUM_VARIANTS = sum(len(values) - 1 for values in KNOBS.values())
# Margin for backward passes that run late, which the search waits for.
_MARGIN = 1.1


def tune(config: Config, overrides: Overrides = None, run_dir: RunDir = None, rendezvous: Rendezvous = None) -> int:
    """Measure the methods of each layer, and cache the fastest for later runs."""
    config = config_file(config)
    cfg = short_run(str(config), load_launch_config(config, overrides or ()))
    if cfg.launch.nodes > 1:
        require_shared_options("tune", rendezvous, run_dir, cfg.launch.nodes)
    folder = run_dir if run_dir is not None else unused_folder(cfg.launch.output_dir, cfg.name)
    console = wide_console()
    try:
        with console.status(f"{cfg.name}: {cfg.train.iterations} steps") as status:
            execute(plan(cfg, folder, rendezvous=rendezvous), on_line=iterations_in(status), on_note=console.print)
    except (RunError, NetlabError) as error:
        print(f"{cfg.name}: {error}", file=sys.stderr)
        return 1
    lines = read_selections(folder)
    console.print(autotune_table(lines))
    not_measured = sum(line.ms is None for line in lines)
    if not_measured or not lines:
        missing = f"{not_measured} of {len(lines)} kinds of calls were not measured"
        print(f"{cfg.name}: {missing}; see {folder}", file=sys.stderr)
        return 1
    console.print(f"{cfg.name}: {len(lines)} selections are in {cfg.overlap.tensor.autotune_cache}")
    return 0


def short_run(name: str, cfg: LaunchConfig) -> LaunchConfig:
    """The same job with as many iterations as autotuning needs, without checkpoints and evaluation.

    Args:
        name: of the config, for errors.
        cfg: any launch config.

    Raises:
        ConfigError: the config has neither tensor nor expert parallelism, no autotuning or no cache.
    """
    tensor, experts = cfg.overlap.tensor, _tunes_experts(cfg)
    if cfg.parallel.tensor == 1 and not experts:
        remedy = "autotuning needs tensor parallelism, or expert parallelism with overlap.expert.method=auto"
        raise ConfigError(name, "parallel.tensor", 1, remedy)
    if tensor.method != "auto" and not experts:
        raise ConfigError(
            name, "overlap.tensor.method", tensor.method, "tune needs auto: add overlap.tensor.method=auto"
        )
    if tensor.autotune_cache is None:
        raise ConfigError(name, "overlap.tensor.autotune_cache", None, "name a folder for the cache")
    calls = float(calls_to_select(2)) if experts else 0.0  # of each layer
    if cfg.parallel.tensor > 1 and tensor.method == "auto":
        calls = max(calls, _linear_calls(cfg))
    iterations = _FIRST_STEPS + math.ceil(_MARGIN * calls / cfg.num_microbatches)
    dump = cfg.model_dump()
    train = {
        "iterations": max(iterations, cfg.train.lr_warmup_iterations + 1),
        "eval_iterations": 0,
        "save": None,
        "save_interval": None,
    }
    return LaunchConfig.model_validate({**dump, "name": f"{cfg.name}_tune", "train": {**dump["train"], **train}})


def _tunes_experts(cfg: LaunchConfig) -> bool:
    return cfg.overlap.expert.method == "auto" and cfg.expert_parallel_size > 1


def _linear_calls(cfg: LaunchConfig) -> float:
    """Calls of each tensor parallel layer until all kinds have a selection."""
    # The output layer runs once a micro-batch, every other layer kind once a layer and micro-batch. Variants of fused
    # kernels are measured in the layers; the output layer may end with fewer of them.
    cuda = cfg.launch.device == "cuda"
    layers, num = cfg.model.num_layers // cfg.parallel.pipeline, 1 + max_p2p_settings(cfg.parallel.tensor) + 2 * cuda
    calls = max(calls_to_select(num), calls_to_select(num, _NUM_VARIANTS if cuda else 0) / layers)
    if not cfg.parallel.sequence_parallel and cfg.overlap.tensor.split == "auto":
        calls += calls_to_select(2)  # then batch overlap of each block is measured
    return calls


def read_selections(run_dir: Path) -> list[AutotuneLine]:
    """The selections of all ranks of a run; of each kind of call that of the first rank that has it."""
    found: dict[tuple[Any, ...], AutotuneLine] = {}
    for path in sorted(run_dir.glob("report-rank*.json")):
        for tree in json.loads(path.read_text(encoding="utf-8")).get("autotuning", ()):
            line = AutotuneLine(**{name: value for name, value in tree.items() if name != "gain"})
            found.setdefault((line.module, line.op, line.rows, line.dtype, line.passes), line)
    return list(found.values())
