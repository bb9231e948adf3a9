"""From a launch config to the command of every rank. Nothing is started and nothing is written here."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_overlap.config import ConfigError, LaunchConfig, dump_config, to_megatron_args
from megatron_overlap.config.resources import resource_folder
from megatron_overlap.tools.launch.netlab import Link, Netlab
from megatron_overlap.tools.launch.ranks import worker_commands
from megatron_overlap.tools.launch.results import RankCommand

CONFIG_FILE, LOG_FOLDER = "config.yaml", "logs"
ANY_RENDEZVOUS = "HEAD_NODE:29400"


@dataclass(frozen=True)
class LaunchPlan:
    """What a launch will do.

    Attributes:
        config: the config it was made from, resolved.
        run_dir: folder of the run; `config.yaml` and `logs/` are made in it.
        commands: what is started: one per rank on cpu, one torchrun for this node on cuda.
        lab: the hosts to make for it; the commands are run inside. None: none.
        link: what carries the communication, in words.
    """

    config: LaunchConfig
    run_dir: Path
    commands: tuple[RankCommand, ...]
    lab: Netlab | None
    link: str

    @property
    def config_path(self) -> Path:
        return self.run_dir / CONFIG_FILE

    @property
    def log_dir(self) -> Path:
        return self.run_dir / LOG_FOLDER

    def render(self) -> str:
        """The plan for a person: a command that could be pasted for every rank, and the config file."""
        lines = [f"run directory: {self.run_dir}", f"network: {self.link}", ""]
        for command in self.commands:
            where = f"rank {command.rank} on {command.host}" if self.config.launch.device == "cpu" else "this node"
            lines.append(f"# {where}")
            lines.append(" ".join(f"{key}={shlex.quote(value)}" for key, value in command.env.items()) + " \\")
            lines.append(f"  {shlex.join(command.argv)}")
        return "\n".join([*lines, "", f"# {self.config_path}", dump_config(self.config).rstrip()])


def plan(cfg: LaunchConfig, run_dir: Path, *, rendezvous: str | None = None) -> LaunchPlan:
    """Plans a launch.

    Args:
        cfg: a checked config.
        run_dir: the folder of this run.
        rendezvous: HOST:PORT of the first node, where there are several.

    Raises:
        ConfigError: hosts that cannot be, or an entry that is not there.
    """
    if cfg.launch.device == "cuda":
        return _on_gpus(cfg, run_dir, rendezvous)
    lab = _lab(cfg)
    argv = [sys.executable, "-m", "megatron_overlap", *entry_args(cfg, run_dir)]
    commands = worker_commands(
        argv,
        cfg.world_size,
        lab=lab,
        threads=cfg.launch.threads_per_rank,
        env={"PYTHONUNBUFFERED": "1"},
        wrap=False,
    )
    return LaunchPlan(cfg, run_dir, tuple(commands), lab, _describe(lab))


def over_loopback(cfg: LaunchConfig) -> LaunchConfig:
    """The same launch without `launch.hosts`: as many ranks, joined by loopback, whose rate nobody limits."""
    launch = {**cfg.launch.model_dump(), "hosts": None, "nodes": 1, "ranks_per_node": cfg.world_size}
    return LaunchConfig.model_validate({**cfg.model_dump(), "launch": launch})


def entry_script(cfg: LaunchConfig) -> Path:
    """The training script: the config's, or the provided one of the architecture.

    Raises:
        ConfigError: it is not there.
    """
    name = cfg.launch.entry
    provided = resource_folder("scripts") / f"pretrain_{cfg.model.arch}.py"
    script = Path(name) if name is not None else provided
    if not script.is_file():
        remedy = "no such file; give the path of a training script"
        if name is None:
            remedy = f"the provided pretrain_{cfg.model.arch}.py is not in this installation; give a training script"
        raise ConfigError(cfg.name, "launch.entry", name, remedy)
    return script


def entry_args(cfg: LaunchConfig, run_dir: Path, *, anywhere: bool = False) -> list[str]:
    """The training script, Megatron's arguments and the plugin's own: what follows `python -m megatron_overlap`.

    Args:
        cfg: a checked config.
        run_dir: the folder of this run.
        anywhere: take `launch.entry` as it is written, also where this machine has no such file.

    Raises:
        ConfigError: the script is not there.
    """
    return [
        str(cfg.launch.entry if anywhere else entry_script(cfg)),
        *to_megatron_args(cfg),
        "--overlap-config",
        str(run_dir / CONFIG_FILE),
        "--overlap-run-dir",
        str(run_dir),
    ]


def _lab(cfg: LaunchConfig) -> Netlab | None:
    hosts = cfg.launch.hosts
    if hosts is None:
        return None
    try:
        link = Link(hosts.gbps, hosts.latency_ms, _bytes(hosts.burst_kib))
        return Netlab(hosts.hosts, ranks_per_host=hosts.ranks_per_host, links=[link] * hosts.hosts)
    except ValueError as error:
        key, value, remedy = str(error).split(": ", 2)
        if key == "burst_bytes":
            key, value, remedy = (
                "burst_kib",
                str(hosts.burst_kib),
                "must hold two frames of 9000 bytes; use 18, or null",
            )
        raise ConfigError(cfg.name, f"launch.hosts.{key}", value, remedy) from error


def _bytes(kib: int | None) -> int | None:
    return kib * 1024 if kib is not None else None


def _describe(lab: Netlab | None) -> str:
    if lab is None:
        return "loopback, its rate is not limited"
    link = lab.links[0]
    delay = f", {link.latency_ms:g} ms each way" if link.latency_ms else ""
    ranks = f"{lab.ranks_per_host} rank{'s' if lab.ranks_per_host > 1 else ''}"
    return (
        f"{lab.hosts} hosts on this machine (network namespaces), {ranks} each, "
        f"{link.gbps:g} Gbit/s each way{delay}, bursts of {link.burst // 1024} KiB"
    )


def _on_gpus(cfg: LaunchConfig, run_dir: Path, rendezvous: str | None) -> LaunchPlan:
    env = gpu_env(cfg)
    argv = [*torchrun(cfg, run_dir, rendezvous), "-m", "megatron_overlap", *entry_args(cfg, run_dir)]
    link = "NCCL's choice"
    if cfg.launch.nodes > 1:
        link += f"; start the same command on all {cfg.launch.nodes} nodes"
    return LaunchPlan(cfg, run_dir, (RankCommand(0, argv, env, "this node"),), None, link)


def gpu_env(cfg: LaunchConfig) -> dict[str, str]:
    """What Python and Megatron read from the environment of every rank on a GPU, whoever starts it."""
    env = {"OMP_NUM_THREADS": str(cfg.launch.threads_per_rank), "PYTHONUNBUFFERED": "1"}
    if cfg.parallel.tensor > 1 or cfg.parallel.context > 1:
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"  # Megatron refuses to start without it before Blackwell
    return env


def torchrun(cfg: LaunchConfig, run_dir: Path, rendezvous: str | None) -> Sequence[str]:
    """torchrun's part of the command line of one node; the nodes find their numbers by the rendezvous."""
    launch = cfg.launch
    meeting = ["--standalone"]
    if launch.nodes > 1:
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous or ANY_RENDEZVOUS]
        meeting += ["--rdzv-id", cfg.name]
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(launch.nodes)),
        *("--nproc-per-node", str(cfg.ranks_per_node)),
        *meeting,
        *("--max-restarts", "0"),
        *("--log-dir", str(run_dir / LOG_FOLDER / "torchrun")),
        *("--tee", "3"),  # both streams of every rank, to a file each and to us
    ]
