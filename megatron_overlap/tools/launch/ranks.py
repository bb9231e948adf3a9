"""Starts N copies of a program as ranks of one job, over loopback or over a netlab."""

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

LAB_PORT = 29500  # any will do: nothing else is in the lab


def free_port() -> int:
    """A TCP port of loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""What makes glibc keep memory that is freed, as the caching allocator of a GPU does, in large pages where the kernel
has them for who asks. Else tensors of some megabytes may be fresh pages on each use."""


def rank_env(rank: int, world_size: int, ranks_per_host: int, port: int, threads: int) -> dict[str, str]:
    """What torch.distributed and Megatron read from the environment of a rank."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank % ranks_per_host),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": str(threads),
        **{name: value for name, value in KEEP_MEMORY.items() if name not in os.environ},
    }


def loopback_env() -> dict[str, str]:
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
    """The commands of `world_size` ranks of `argv`: in `lab`, or over loopback.

    `wrap=False` leaves out what takes a command into the lab, which then need not be open.

    Raises:
        ValueError: the lab has places for another number of ranks.
    """
    if lab is not None and lab.world_size != world_size:
        places = f"{lab.hosts} hosts of {lab.ranks_per_host}"
        raise ValueError(f"world_size: {world_size}: the lab has {lab.world_size} places, {places}")
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
    """Runs `program` as `world_size` ranks and returns when all are done.

    Args:
        program: path of a Python script, or name of a module.
        args: its arguments, the same for all ranks.
        world_size: number of ranks; RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT are set for
            them.
        hosts: None: loopback. Otherwise a netlab with that many hosts, among which the ranks are divided
            evenly.
        gbps: rate of each host's link in Gbit/s, with `hosts`.
        lab: an open lab to run in, instead of `hosts` and `gbps`; it stays open.
        threads: OMP_NUM_THREADS of each rank.
        env: added to the environment of every rank.
        log_dir: for `rank{r}.log`; None: a temporary folder, removed when all went well.
        timeout_s, on_line: as for `run_ranks`.

    Raises:
        ValueError: ranks that cannot be divided among the hosts; both `hosts` and `lab`.
        NetlabError: no lab on this machine.
        RankFailed, RunTimeout: as for `run_ranks`.
    """
    if hosts is not None:
        if lab is not None:
            raise ValueError("hosts: give it or lab, not both")
        if hosts < 1 or world_size % hosts:
            raise ValueError(f"hosts: {hosts}: {world_size} ranks cannot be divided evenly among them")
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
    if log_dir is None:  # after a failure it stays: the message names a log in it
        shutil.rmtree(folder)
    return result
