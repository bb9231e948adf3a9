"""Write a launch as a Slurm batch file. It starts and submits nothing.

The file contains the resolved config and all Megatron arguments, so that it documents the run. Ranks get their numbers
from Slurm (`SLURM_NODEID`, `SLURM_PROCID`), so that adjacent tasks of the job are adjacent ranks of a tensor group.
torchrun's rendezvous would number the nodes in their order of arrival.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from megatron_overlap.config import ConfigError, LaunchConfig, dump_config
from megatron_overlap.tools.launch.plan import CONFIG_FILE, entry_args, gpu_env
from megatron_overlap.tools.launch.ranks import loopback_env

_RUN_DIR = Path("/MEGATRON_OVERLAP_RUN_DIR")  # replaced by "$RUN_DIR", which contains the job id
_END_OF_CONFIG = "END_OF_CONFIG"


@dataclass(frozen=True)
class _Run:
    """One run of the batch file, as the template needs it.

    Attributes:
        name: name of its config.
        config: text of its config file.
        args: training script and arguments, quoted for bash; one line for each flag with its values.
    """

    name: str
    config: str
    args: tuple[str, ...]


def batch_file(configs: Sequence[LaunchConfig], file: str = "job.sh") -> str:
    """The text of a batch file.

    Args:
        configs: one run, or several runs of equal size, which become a job array: task i is run i.
        file: name of the file, for the usage line in it.

    Raises:
        ConfigError: Slurm cannot run a config, or the runs need different job options.
    """
    first = configs[0]
    for config in configs:
        if config.launch.hosts is not None:
            remedy = "network namespaces are on one machine; use launch.hosts=null for Slurm"
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
    # With a container the script may exist only in the image.
    in_container = config.launch.slurm.container_image is not None
    for arg in entry_args(config, _RUN_DIR, anywhere=in_container and config.launch.entry is not None):
        word = shlex.quote(arg).replace(f"{_RUN_DIR}", '"$RUN_DIR"')
        if not lines or arg.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return _Run(config.name, dump_config(config).rstrip("\n"), tuple(lines))


def _same_job(first: LaunchConfig, other: LaunchConfig) -> None:
    """Require equal job options: all tasks of an array have the same nodes and options.

    Raises:
        ConfigError: a key that determines the job differs.
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
            other.name,
            "parallel.tensor",
            other.parallel.tensor,
            "must be 1 in all runs or in none: they share one environment",
        )
