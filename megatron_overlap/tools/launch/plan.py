"""Plan a launch: the command of every rank, or a Slurm batch file. `plan` starts nothing; `execute` runs the ranks."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megatron_overlap.config import ConfigError, LaunchConfig, dump_config, to_megatron_args
from megatron_overlap.config.errors import writing
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.launch.netlab import Netlab, NetlabError
from megatron_overlap.tools.launch.processes import OnLine, RankCommand, loopback_env, run_ranks, worker_commands

CONFIG_FILE, LOG_FOLDER = "config.yaml", "logs"
_MAX_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
_FSDP_FLAGS = "--use-torch-fsdp2", "--use-megatron-fsdp"  # Megatron refuses one connection with them


@dataclass(frozen=True)
class LaunchPlan:
    """The commands of one launch and where they run."""

    config: LaunchConfig
    run_dir: Path  # `execute` makes `config.yaml` and `logs/` in it
    commands: tuple[RankCommand, ...]  # one per rank on cpu; one torchrun for this node on cuda
    lab: Netlab | None  # the hosts in which the commands run; None: loopback or the real network
    link: str  # description of the network

    def render(self) -> str:
        """The plan as text: for every rank a command to paste into a shell, then the config file."""
        lines = [f"run directory: {self.run_dir}", f"network: {self.link}", ""]
        for command in self.commands:
            where = f"rank {command.rank} on {command.host}" if self.config.launch.device == "cpu" else "this node"
            env = " ".join(f"{key}={shlex.quote(value)}" for key, value in command.env.items())
            lines += [f"# {where}", f"{env} \\", f"  {shlex.join(command.argv)}"]
        return "\n".join([*lines, "", f"# {self.run_dir / CONFIG_FILE}", dump_config(self.config).rstrip()])


def plan(cfg: LaunchConfig, run_dir: Path, *, rendezvous: str | None = None) -> LaunchPlan:
    """Plan a launch in the folder `run_dir`. `rendezvous`: HOST:PORT of the first node, for several nodes.

    Raises ConfigError if the training script does not exist, or there is a rendezvous of one node.
    """
    if rendezvous is not None and cfg.launch.nodes == 1:
        remedy = f"--rendezvous {rendezvous} has no effect on one node; give the number of nodes, or leave it out"
        raise ConfigError(cfg.name, "launch.nodes", 1, remedy)
    program = ["-m", "megatron_overlap", *entry_args(cfg, run_dir)]
    if cfg.launch.device == "cuda":
        # torchrun starts the ranks of one node. The rendezvous assigns node ranks.
        link, rdzv = "chosen by NCCL", ["--standalone"]
        if cfg.launch.nodes > 1:
            link += f"; start the same command on all {cfg.launch.nodes} nodes"
            rdzv = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous or "HEAD_NODE:29400", "--rdzv-id", cfg.name]
        argv = [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--nnodes", str(cfg.launch.nodes), "--nproc-per-node", str(cfg.ranks_per_node)),
            *rdzv,
            *("--max-restarts", "0", "--log-dir", str(run_dir / LOG_FOLDER / "torchrun")),
            *("--tee", "3"),  # stdout and stderr of every rank: to files and to this process
            *program,
        ]
        return LaunchPlan(cfg, run_dir, (RankCommand(0, argv, gpu_env(cfg), "this node"),), None, link)
    lab, link = None, "loopback without a rate limit"
    if (hosts := cfg.launch.hosts) is not None:
        lab = Netlab(hosts.hosts, hosts.gbps, hosts.ranks_per_host)
        ranks = f"{hosts.ranks_per_host} rank{'s' if hosts.ranks_per_host > 1 else ''}"
        link = (
            f"{hosts.hosts} hosts on this machine (network namespaces), {ranks} each, "
            f"{hosts.gbps:g} Gbit/s each way, bursts of {lab.links[0].burst_bytes // 1024} KiB"
        )
    commands = worker_commands([sys.executable, *program], cfg.world_size, lab=lab, threads=cfg.launch.threads_per_rank)
    return LaunchPlan(cfg, run_dir, tuple(commands), lab, link)


def unused_folder(parent: str, name: str) -> Path:
    """A folder in `parent` that does not exist: the name and the time."""
    stem = Path(parent) / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = stem, 2
    while folder.exists():
        folder, number = stem.with_name(f"{stem.name}-{number}"), number + 1
    return folder


def over_loopback(cfg: LaunchConfig) -> LaunchConfig:
    """The same launch without `launch.hosts`: as many ranks over loopback, without a rate limit."""
    return changed(cfg, launch={"hosts": None, "nodes": 1, "ranks_per_node": cfg.world_size})


def changed(config: LaunchConfig, **sections: Mapping[str, Any] | Sequence[str]) -> LaunchConfig:
    """A config with some keys of some sections replaced, or a whole text or list, validated again."""
    dump = config.model_dump()
    for section, keys in sections.items():
        dump[section] = {**dump[section], **keys} if isinstance(keys, Mapping) else keys
    return LaunchConfig.model_validate(dump)


def entry_args(cfg: LaunchConfig, run_dir: Path, *, anywhere: bool = False) -> list[str]:
    """The arguments of `python -m megatron_overlap`: training script, Megatron's arguments, the plugin's arguments.

    `anywhere`: take `launch.entry` as written, even if this machine has no such file. Raises ConfigError if it does not
    exist.
    """
    name, model = cfg.launch.entry, cfg.model
    # `pretrain_llama.py` adds the flags of a LLaMA that a command line lacks, also those that `model` turns off.
    llama = model.arch == "llama" and model.swiglu and model.untie_embeddings and not model.add_bias
    provided = "pretrain_llama.py" if llama else "pretrain_gpt.py"
    script = resource_folder("scripts") / provided if name is None else Path(name)
    if not (anywhere or script.is_file()):
        remedy = "no such file; give the path of a training script"
        if name is None:
            remedy = f"the provided {provided} is not in this installation; give a training script"
        raise ConfigError(cfg.name, "launch.entry", name, remedy)
    ours = ["--overlap-config", str(run_dir / CONFIG_FILE), "--overlap-run-dir", str(run_dir)]
    return [name if anywhere and name else str(script), *to_megatron_args(cfg), *ours]


def gpu_env(cfg: LaunchConfig) -> dict[str, str]:
    """Environment of every rank on a GPU, under torchrun and Slurm. The user's number of queues stays."""
    env = {"OMP_NUM_THREADS": str(cfg.launch.threads_per_rank), "PYTHONUNBUFFERED": "1"}
    if (cfg.parallel.tensor > 1 or cfg.parallel.context > 1) and not {*_FSDP_FLAGS} & {*cfg.megatron_args}:
        # Megatron requires 1 before Blackwell, and 1 or 32 with --overlap-moe-expert-parallel-comm.
        env[_MAX_CONNECTIONS] = os.environ.get(_MAX_CONNECTIONS, "1")
    return env


def execute(
    launch_plan: LaunchPlan, *, on_line: OnLine | None = None, on_note: Callable[[str], None] = lambda text: None
) -> float:
    """Run a plan to its end, and return the wall time in seconds.

    If the machine cannot make `launch.hosts` and its `fallback` is `loopback`, the ranks run over loopback. The config
    in the run directory then has no hosts, and `on_note` gets a note for the user.

    Raises:
        ConfigError: the run directory cannot be made, or this machine has too few GPUs.
        NetlabError: the machine cannot make the hosts; no rank was started.
        RunError: see `run_ranks`.
    """
    folder, hosts = launch_plan.run_dir, launch_plan.config.launch.hosts
    _require_gpus(launch_plan.config)
    with contextlib.ExitStack() as stack:
        if launch_plan.lab is not None and hosts is not None:
            try:
                stack.enter_context(launch_plan.lab)
            except NetlabError as error:
                if hosts.fallback != "loopback":
                    raise NetlabError(f"{error}; launch.hosts.fallback=loopback runs without limited links") from error
                on_note(f"the machine cannot make launch.hosts: {error}; running over loopback without a rate limit")
                launch_plan = plan(over_loopback(launch_plan.config), folder)
        config, path = launch_plan.config, folder / CONFIG_FILE
        with writing("launch --run-dir", folder):
            folder.mkdir(parents=True, exist_ok=True)
        # Several nodes may write the same file of a shared folder. The rename is atomic: readers see a complete file.
        with tempfile.NamedTemporaryFile("w", dir=folder, prefix=path.name, delete=False) as file:
            file.write(dump_config(config))
        os.replace(file.name, path)
        timeout_s, logs = config.launch.timeout_s, folder / LOG_FOLDER
        if config.launch.nodes > 1:  # each node has a rank 0 of its own: torchrun
            logs /= socket.gethostname()
        return run_ranks(launch_plan.commands, timeout_s=timeout_s, log_dir=logs, lab=launch_plan.lab, on_line=on_line)


@cache
def _gpus() -> int | None:
    """The GPUs that torch finds on this machine; None if it cannot be asked. A command does not import torch itself."""
    argv = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    count = subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    return int(count) if count.isdigit() else None


def _require_gpus(cfg: LaunchConfig) -> None:
    if cfg.launch.device != "cuda":
        return
    count = _gpus()
    if count is not None and count < cfg.ranks_per_node:
        reason = f"torch finds {count} GPUs on this machine, and a node of the launch has {cfg.ranks_per_node} ranks"
        raise ConfigError(cfg.name, "launch.device", "cuda", f"{reason}; use launch --rehearse, or launch.device=cpu")


_RUN_DIR = Path("/MEGATRON_OVERLAP_RUN_DIR")  # replaced by "$RUN_DIR", which contains the job id


def batch_file(configs: Sequence[LaunchConfig], file: str = "job.sh") -> str:
    """The text of a batch file, with the name of the file in the usage line. Several runs become a job array.

    Raises ConfigError if Slurm cannot run a config, or the runs need different job options.
    """
    first = configs[0]
    for config in configs:
        if config.launch.hosts is not None:
            remedy = "network namespaces are on one machine; use launch.hosts=null for Slurm"
            raise ConfigError(config.name, "launch.hosts", config.launch.hosts.hosts, remedy)
        _same_job(first, config)
    launch, ranks_per_node = first.launch, first.ranks_per_node
    gpus, env = ranks_per_node, gpu_env(first)
    if launch.device == "cpu":
        gpus, env = 0, {**loopback_env(), "OMP_NUM_THREADS": str(launch.threads_per_rank), "PYTHONUNBUFFERED": "1"}
    loader = PackageLoader("megatron_overlap.tools.launch")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.filters["quote"] = shlex.quote
    environment.filters["inside_quotes"] = lambda text: text.replace("'", "'\\''")
    return environment.get_template("slurm.sh.j2").render(
        file=shlex.quote(file),
        runs=[_slurm_run(config) for config in configs],
        launch=launch,
        ranks_per_node=ranks_per_node,
        gpus=gpus,
        env=env,
        config_file=CONFIG_FILE,
    )


def _slurm_run(config: LaunchConfig) -> dict[str, object]:
    """One run for the template: `args` has the script and the arguments, quoted for bash, one line for each flag."""
    lines: list[str] = []
    # With a container the script may exist only in the image.
    in_container = config.launch.slurm.container_image is not None
    for arg in entry_args(config, _RUN_DIR, anywhere=in_container and config.launch.entry is not None):
        word = shlex.quote(arg).replace(f"{_RUN_DIR}", '"$RUN_DIR"')
        if not lines or arg.startswith("--"):
            lines.append(word)
        else:
            lines[-1] += f" {word}"
    return {"name": config.name, "config": dump_config(config).rstrip("\n"), "args": lines}


def _same_job(first: LaunchConfig, other: LaunchConfig) -> None:
    """Require equal job options: all tasks of an array have the same nodes and options."""
    for key in ("device", "nodes", "threads_per_rank", "output_dir", "slurm"):
        expected, found = getattr(first.launch, key), getattr(other.launch, key)
        if found != expected:
            remedy = f"must be {expected} as in {first.name}: the runs are one job array"
            raise ConfigError(other.name, f"launch.{key}", found, remedy)
    if other.world_size != first.world_size:
        remedy = f"must be {first.ranks_per_node} as in {first.name}: the runs are one job array"
        raise ConfigError(other.name, "launch.ranks_per_node", other.ranks_per_node, remedy)
    if gpu_env(other) != gpu_env(first):
        remedy = "must be 1 in all runs or in none: they share one environment"
        raise ConfigError(other.name, "parallel.tensor", other.parallel.tensor, remedy)
