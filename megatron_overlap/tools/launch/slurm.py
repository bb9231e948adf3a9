"""A launch as a Slurm batch file. Nothing is started and nothing is submitted here.

The file stands for itself: the resolved config and Megatron's arguments are written out in it, so that what was run can
be read afterwards. Ranks get their numbers from Slurm (`SLURM_NODEID`, `SLURM_PROCID`), hence neighbours in the job are
neighbours in a tensor group; torchrun's own rendezvous would number the nodes as they come.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from megatron_overlap.config import ConfigError, LaunchConfig, dump_config
from megatron_overlap.tools.launch.plan import CONFIG_FILE, entry_args, gpu_env
from megatron_overlap.tools.launch.ranks import loopback_env

_RUN_DIR = Path("/MEGATRON_OVERLAP_RUN_DIR")  # becomes "$RUN_DIR": only the job knows its number
_END_OF_CONFIG = "END_OF_CONFIG"


@dataclass(frozen=True)
class _Run:
    """One run of the file, as the template writes it.

    Attributes:
        name: of its config.
        config: the text of its config file.
        args: the training script and its arguments, quoted for bash; a flag and its values on a line.
    """

    name: str
    config: str
    args: tuple[str, ...]


def batch_file(configs: Sequence[LaunchConfig], file: str = "job.sh") -> str:
    """The text of a batch file.

    Args:
        configs: one run, or several of the same size: they become a job array, task i is run i.
        file: what the file will be called, for the usage line in it.

    Raises:
        ConfigError: a config cannot be run by Slurm, or the runs need different jobs.
    """
    first = configs[0]
    for config in configs:
        if config.launch.hosts is not None:
            remedy = "these are made on one machine; use launch.hosts=null for Slurm"
            raise ConfigError(config.name, "launch.hosts", config.launch.hosts.hosts, remedy)
        _same_job(first, config)
    launch = first.launch
    on_cpu = launch.device == "cpu"
    env = {**loopback_env(), "OMP_NUM_THREADS": str(launch.threads_per_rank), "PYTHONUNBUFFERED": "1"}
    template = resources.files("megatron_overlap.tools.launch").joinpath("templates/slurm.sh.j2")
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["inside_quotes"] = lambda text: text.replace("'", "'\\''")
    return environment.from_string(template.read_text(encoding="utf-8")).render(
        file=shlex.quote(file),
        runs=[_run(config) for config in configs],
        slurm=launch.slurm,
        nodes=launch.nodes,
        ranks_per_node=first.ranks_per_node,
        gpus=0 if on_cpu else first.ranks_per_node,
        output_dir=launch.output_dir,
        env=env if on_cpu else gpu_env(first),
        config_file=CONFIG_FILE,
        end=_END_OF_CONFIG,
    )


def _run(config: LaunchConfig) -> _Run:
    lines: list[str] = []
    # In a container the script need not be on this machine.
    in_container = config.launch.slurm.container_image is not None
    for arg in entry_args(config, _RUN_DIR, anywhere=in_container and config.launch.entry is not None):
        word = shlex.quote(arg).replace(f"{_RUN_DIR}", '"$RUN_DIR"')
        if not lines or arg.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _Run(config.name, dump_config(config).rstrip("\n"), tuple(lines))


def _same_job(first: LaunchConfig, other: LaunchConfig) -> None:
    """An array is one job: its tasks have the same nodes and options.

    Raises:
        ConfigError: a key that decides about the job differs.
    """
    for key in ("device", "nodes", "threads_per_rank", "output_dir", "slurm"):
        expected, found = getattr(first.launch, key), getattr(other.launch, key)
        if found != expected:
            remedy = f"must be {expected} as in {first.name}: the runs are one job array"
            raise ConfigError(other.name, f"launch.{key}", found, remedy)
    if other.world_size != first.world_size:
        remedy = f"must be {first.ranks_per_node} as in {first.name}: the runs are one job array"
        raise ConfigError(other.name, "launch.ranks_per_node", other.ranks_per_node, remedy)
    if (other.parallel.tensor > 1 or other.parallel.context > 1) != (
        first.parallel.tensor > 1 or first.parallel.context > 1
    ):
        raise ConfigError(
            other.name, "parallel.tensor", other.parallel.tensor, "the runs of an array need one environment"
        )
