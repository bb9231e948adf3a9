"""Run N copies of a program as the ranks of one job, over loopback or in a netlab."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.processes import OnLine, RankCommand, RunResult, run_ranks

LAB_PORT = 29500  # always free: the lab has its own network namespaces


def free_port() -> int:
    """A free TCP port of loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


MALLOC_ENV = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings that make glibc reuse freed memory, like the caching allocator of a GPU, in huge pages if the kernel offers
them. Without them tensors of some megabytes may be fresh pages on each use."""


def rank_env(rank: int, world_size: int, ranks_per_host: int, port: int, threads: int) -> dict[str, str]:
    """Environment variables of a rank for torch.distributed, Megatron and glibc."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        **{name: value for name, value in MALLOC_ENV.items() if name not in os.environ},
    }


def loopback_env() -> dict[str, str]:
    """Environment variables that make torch.distributed use loopback."""
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def worker_commands(
    argv: Sequence[str],
    world_size: int,
    *,
    lab: Netlab | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    wrap: bool = True,
) -> list[RankCommand]:
    """The commands of `world_size` ranks that execute `argv` in `lab` or over loopback.

    `wrap=False` omits the prefix that enters the lab; the lab then need not be open.

    Raises:
        ValueError: the lab has another number of ranks.
    """
    if lab is not None and lab.world_size != world_size:
        places = f"{lab.hosts} hosts of {lab.ranks_per_host}"
        raise ValueError(f"world_size: {world_size}: the lab has {lab.world_size} ranks, {places}")
    port = LAB_PORT if lab is not None else free_port()
    commands = []
    for rank in range(world_size):
        values = rank_env(rank, world_size, lab.ranks_per_host if lab else world_size, port, threads)
        if lab is None:
            commands.append(RankCommand(rank, list(argv), {**values, **loopback_env(), **(env or {})}))
            continue
        host = lab.host_of(rank)
        values |= {**lab.env(host), **(env or {})}
        inside = lab.wrap(host, argv) if wrap else list(argv)
        commands.append(RankCommand(rank, inside, values, lab.host_name(host)))
    return commands


def run_workers(
    program: str | os.PathLike[str],
    args: Sequence[str],
    world_size: int,
    *,
    hosts: int | None = None,
    gbps: float = 1.0,
    lab: Netlab | None = None,
    threads: int = 1,
    env: Mapping[str, str] | None = None,
    log_dir: Path | None = None,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
) -> RunResult:
    """Run `program` as `world_size` ranks and return when all ranks have ended.

    Args:
        program: path of a Python script, or name of a module.
        args: arguments, equal for all ranks.
        world_size: number of ranks. The environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT.
        hosts: number of hosts of a new netlab, which share the ranks evenly. None: loopback.
        gbps: rate of each host's link in Gbit/s, with `hosts`.
        lab: an open lab, instead of `hosts` and `gbps`; it stays open.
        threads: OMP_NUM_THREADS of each rank.
        env: additions to the environment of every rank.
        log_dir: folder of `rank{r}.log`; None: a temporary folder, which is removed after success.
        timeout_s, on_line: as for `run_ranks`.

    Raises:
        ValueError: the hosts do not divide the ranks, or both `hosts` and `lab` are given.
        NetlabError: this machine cannot make a lab.
        RankFailed, RunTimeout: as for `run_ranks`.
    """
    if hosts is not None:
        if lab is not None:
            raise ValueError("hosts: give hosts or lab, not both")
        if hosts < 1 or world_size % hosts:
            raise ValueError(f"hosts: {hosts}: must divide the {world_size} ranks")
        with Netlab(hosts, gbps, world_size // hosts) as made:
            return run_workers(
                program,
                args,
                world_size,
                lab=made,
                threads=threads,
                env=env,
                log_dir=log_dir,
                timeout_s=timeout_s,
                on_line=on_line,
            )
    name = os.fspath(program)
    start = [name] if name.endswith(".py") or Path(name).is_file() else ["-m", name]
    argv = [sys.executable, "-u", *start, *args]
    commands = worker_commands(argv, world_size, lab=lab, threads=threads, env=env)
    folder = log_dir or Path(tempfile.mkdtemp(prefix="megatron_overlap_"))
    result = run_ranks(commands, timeout_s=timeout_s, log_dir=folder, on_line=on_line)
    if log_dir is None:  # after a failure the folder stays: the message names a log in it
        shutil.rmtree(folder)
    return result
