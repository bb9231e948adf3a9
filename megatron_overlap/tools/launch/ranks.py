"""Run N copies of a program as the ranks of one job, over loopback or in a netlab."""

import errno
import os
import random
import shutil
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from megatron_overlap.tools.launch.netlab import Netlab
from megatron_overlap.tools.launch.processes import OnLine, RankCommand, run_ranks

LAB_PORT = 29500  # always free: the lab has its own network namespaces
_PORTS = range(20000, 32000)  # below the local ports of Linux (net.ipv4.ip_local_port_range: 32768 to 60999)


def free_port() -> int:
    """A free TCP port of loopback that the kernel gives to no outgoing connection before rank 0 listens on it.

    Raises:
        OSError: none of 100 ports is free.
    """
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(errno.EADDRINUSE, f"no free port among 100 from {_PORTS.start} to {_PORTS.stop - 1}")


MALLOC_ENV = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Settings that make glibc reuse freed memory, like the caching allocator of a GPU, in huge pages if the kernel offers
them. Without them tensors of some megabytes may be fresh pages on each use."""


def loopback_env() -> dict[str, str]:
    """Environment variables that make torch.distributed use loopback."""
    return {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1"}


def worker_commands(
    argv: Sequence[str], world_size: int, *, lab: Netlab | None = None, threads: int = 1
) -> list[RankCommand]:
    """The commands of `world_size` ranks that execute `argv` over loopback, or on the hosts of `lab`.

    Raises:
        ValueError: the lab has another number of ranks.
    """
    ranks_per_host, port = (world_size, free_port()) if lab is None else (lab.ranks_per_host, LAB_PORT)
    if lab is not None and lab.world_size != world_size:
        places = f"{lab.hosts} hosts of {ranks_per_host}"
        raise ValueError(f"world_size: {world_size}: the lab has {lab.world_size} ranks, {places}")
    commands = []
    for rank in range(world_size):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": str(rank % ranks_per_host),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "MASTER_PORT": str(port),
            "OMP_NUM_THREADS": str(threads),
            "PYTHONUNBUFFERED": "1",
            **{name: value for name, value in MALLOC_ENV.items() if name not in os.environ},
        }
        if lab is None:
            commands.append(RankCommand(rank, argv, env | loopback_env()))
        else:
            host = lab.host_of(rank)
            commands.append(RankCommand(rank, argv, env | lab.env(host), lab.host_name(host)))
    return commands


def run_workers(
    script: str | os.PathLike[str],
    args: Sequence[str],
    world_size: int,
    *,
    lab: Netlab | None = None,
    timeout_s: float | None = None,
    on_line: OnLine | None = None,
) -> None:
    """Run a Python script as `world_size` ranks and return when all ranks have ended.

    The environment has RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. The ranks run on the hosts of an open
    `lab`, or over loopback.

    Raises:
        ValueError, RunError: as `worker_commands` and `run_ranks`; the text names a log file, which stays.
    """
    commands = worker_commands([sys.executable, os.fspath(script), *args], world_size, lab=lab)
    folder = Path(tempfile.mkdtemp(prefix="megatron_overlap_"))
    run_ranks(commands, timeout_s=timeout_s, log_dir=folder, lab=lab, on_line=on_line)
    shutil.rmtree(folder)
