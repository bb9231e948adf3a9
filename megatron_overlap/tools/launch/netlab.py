"""Several hosts on one Linux machine: network namespaces joined by a bridge, each link with its own rate.

The namespaces have no names in the file system. One small process, the keeper, holds them open; it ends when
its owner ends, for whatever reason, and the kernel then takes the namespaces, their interfaces and their
queues away. So there is nothing to clean up after a crash, and no other owner's lab can be hit by a clean-up.
The bridge is in a namespace of its own as well: the machine's own interfaces, addresses and routes are never
touched.
"""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_overlap.tools.launch import orphans

CHILD = str(Path(__file__).with_name("helper_process.py"))
HELPER = (sys.executable, "-I", "-S", CHILD)
INTERFACE = "eth0"
INSIDE_INTERFACE = "eth1"
MAX_HOSTS = 250
# Large frames, as such clusters use: headers take 0.7 % of the rate, against 4.4 % with frames of 1500 bytes.
MTU_BYTES = 9000
_NETWORK = ipaddress.ip_network("10.77.0.0/16")


class NetlabError(RuntimeError):
    """The lab could not be made; the text says why."""


@dataclass(frozen=True)
class Link:
    """How one host is connected, the same in both directions.

    Attributes:
        gbps: rate in Gbit/s (10^9), counted as the transfer does, with headers.
        latency_ms: added on the way out of the host. Needs the kernel's netem.
        burst_bytes: what may pass at once after a pause, before the rate holds. None: a choice that suits the
            rate.
    """

    gbps: float
    latency_ms: float = 0.0
    burst_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 0.001 <= self.gbps <= 100:
            raise ValueError(f"gbps: {self.gbps}: must be between 0.001 and 100")
        if not 0 <= self.latency_ms <= 1000:
            raise ValueError(f"latency_ms: {self.latency_ms}: must be between 0 and 1000")
        if self.burst_bytes is not None and self.burst_bytes < 2 * MTU_BYTES:
            raise ValueError(f"burst_bytes: {self.burst_bytes}: must be at least {2 * MTU_BYTES}, two frames")

    @property
    def burst(self) -> int:
        """Bytes of the token bucket."""
        if self.burst_bytes is not None:
            return self.burst_bytes
        # What half a millisecond carries, so that a late timer costs no rate; and one full segment of TCP
        # offload, so that the kernel need not cut segments up.
        return max(64 * 1024, int(self.gbps * 1e9 / 8 * 0.5e-3))

    def shaper(self) -> str:
        return f"tbf rate {round(self.gbps * 1e9)}bit burst {self.burst}b latency 400ms"

    def out_qdiscs(self) -> list[str]:
        """`tc qdisc add dev ...` lines for the host's end."""
        if not self.latency_ms:
            return [f"root {self.shaper()}"]
        delay = f"root handle 1: netem delay {round(self.latency_ms * 1000)}us limit 100000"
        return [delay, f"parent 1:1 handle 2: {self.shaper()}"]

    def in_qdiscs(self) -> list[str]:
        """The same for the bridge's end, which is the way into the host."""
        return [f"root {self.shaper()}"]


class Netlab:
    """Context manager: `hosts` hosts, each with its own rate-limited link.

    Args:
        hosts: number of hosts.
        gbps: rate of every host's link in Gbit/s.
        ranks_per_host: ranks that share a host, and its link.
        latency_ms: one way, on every link.
        burst_bytes: see `Link`.
        links: one `Link` per host, instead of the three above: hosts may differ.
        hosts_per_node: so many hosts in a row are one node. Each is then a device with a network card of its own, its
            link, which carries what leaves the node; hosts of a node reach each other by a switch of their own.
        inside_gbps: rate of each host's link to that switch in Gbit/s; None: as fast as the machine copies.

    Raises:
        ValueError: hosts, ranks or a link out of range.
        NetlabError: on entering, when this machine or user cannot have one; says why.

    Example:
        with Netlab(hosts=2, gbps=1.0) as lab:
            subprocess.run(lab.wrap(0, ["ip", "addr"]), env=os.environ | lab.env(0))
    """

    def __init__(
        self,
        hosts: int,
        gbps: float = 1.0,
        ranks_per_host: int = 1,
        latency_ms: float = 0.0,
        burst_bytes: int | None = None,
        links: Sequence[Link] | None = None,
        hosts_per_node: int = 1,
        inside_gbps: float | None = None,
    ) -> None:
        if not 1 <= hosts <= MAX_HOSTS:
            raise ValueError(f"hosts: {hosts}: must be between 1 and {MAX_HOSTS}")
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host: {ranks_per_host}: must be at least 1")
        if links is not None and len(links) != hosts:
            raise ValueError(f"links: {len(links)} of them for {hosts} hosts: give one per host")
        if hosts_per_node < 1 or hosts % hosts_per_node:
            raise ValueError(f"hosts_per_node: {hosts_per_node}: must divide the {hosts} hosts")
        if inside_gbps is not None and hosts_per_node == 1:
            raise ValueError(f"inside_gbps: {inside_gbps}: nodes of one host have nothing inside; set hosts_per_node")
        self.hosts_per_node = hosts_per_node
        self.inside = Link(inside_gbps) if inside_gbps is not None else None
        self.links = tuple(links) if links is not None else (Link(gbps, latency_ms, burst_bytes),) * hosts
        self.hosts = hosts
        self.ranks_per_host = ranks_per_host
        self.name = f"mo{os.getpid()}"
        self._keeper: subprocess.Popen[str] | None = None
        self._made: dict[str, Any] = {}

    @property
    def world_size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def in_user_namespace(self) -> bool:
        """Whether it was made without the rights of root; programs then see themselves as user 0."""
        return bool(self._made.get("user_namespace"))

    @property
    def tcp_kept(self) -> dict[str, str]:
        """Settings of TCP inside that could not be made, each with the value that stays."""
        return dict(self._made.get("tcp_kept", {}))

    def host_of(self, rank: int) -> int:
        """Host of a rank: ranks fill one host after the other."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank: {rank}: this lab has {self.world_size}")
        return rank // self.ranks_per_host

    def host_name(self, host: int) -> str:
        return f"{self.name}h{self._checked(host)}"

    def address(self, host: int) -> str:
        """IPv4 address of a host; it exists inside the lab only."""
        return str(_NETWORK[self._checked(host) + 1])

    def env(self, host: int) -> dict[str, str]:
        """Environment of a program on that host, for torch.distributed to use the lab's network."""
        self._checked(host)
        return {
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            "TP_SOCKET_IFNAME": INTERFACE,
            "MASTER_ADDR": self.address(0),
        }

    def wrap(self, host: int, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` on that host. It becomes `argv`: same process, same pid.

        Raises:
            NetlabError: the lab is not open.
        """
        return [*self._enter(self._made.get("hosts", [])[self._checked(host)] if self._made else None), *argv]

    def wrap_switch(self, argv: Sequence[str]) -> list[str]:
        """The same beside the bridge, where one end of every link can be seen: for diagnosis."""
        return [*self._enter(self._made.get("switch")), *argv]

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        """Makes the hosts; `with` does the same.

        Raises:
            NetlabError: this machine or user cannot have them, or the lab is open.
        """
        if sys.platform != "linux":
            raise NetlabError(f"needs Linux; this is {sys.platform}")
        if self._keeper is not None:
            raise NetlabError("this lab is open already")
        orphans.remove()
        self._keeper = subprocess.Popen(
            [*HELPER, "keep", orphans.label(), json.dumps(self._spec())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            assert self._keeper.stdout is not None
            answer = self._keeper.stdout.readline()
            made: dict[str, Any] = json.loads(answer) if answer.strip() else self._keeper_died()
            if "error" in made:
                raise NetlabError(made["error"])
        except BaseException:
            self.close()
            raise
        self._made = made
        if self.tcp_kept and self.hosts > 1:
            kept = ", ".join(f"{key} {value}" for key, value in self.tcp_kept.items())
            warnings.warn(
                f"netlab: TCP stays as this machine has it ({kept}): "
                "its links may stand still now and then, and times over them scatter more; see docs/netlab.md",
                stacklevel=2,
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets go of the namespaces. They vanish with the last program inside. May be called twice."""
        keeper, self._keeper, self._made = self._keeper, None, {}
        if keeper is None:
            return
        keeper.kill()  # holds nothing that needs saving
        keeper.wait()
        for stream in (keeper.stdin, keeper.stdout, keeper.stderr):
            if stream is not None:
                stream.close()

    def _mates(self, host: int) -> list[int]:
        """The other hosts of a host's node."""
        first = host // self.hosts_per_node * self.hosts_per_node
        return [mate for mate in range(first, first + self.hosts_per_node) if mate != host]

    def _checked(self, host: int) -> int:
        if not 0 <= host < self.hosts:
            raise ValueError(f"host: {host}: this lab has {self.hosts}")
        return host

    def _enter(self, net_fd: int | None) -> list[str]:
        if net_fd is None:
            raise NetlabError("this lab is not open")
        return [*HELPER, "enter", str(self._made["pid"]), str(net_fd), str(int(self.in_user_namespace))]

    def _spec(self) -> Mapping[str, Any]:
        return {
            "owner": os.getpid(),
            "name": self.name,
            "interface": INTERFACE,
            "mtu_bytes": MTU_BYTES,
            "inside_interface": INSIDE_INTERFACE,
            "inside_qdiscs": self.inside.in_qdiscs() if self.inside else [],
            "hosts": [
                {
                    "node": host // self.hosts_per_node,
                    "mates": [self.address(mate) for mate in self._mates(host)],
                    "address": f"{self.address(host)}/{_NETWORK.prefixlen}",
                    "out_qdiscs": link.out_qdiscs(),
                    "in_qdiscs": link.in_qdiscs(),
                }
                for host, link in enumerate(self.links)
            ],
        }

    def _keeper_died(self) -> dict[str, Any]:
        assert self._keeper is not None
        assert self._keeper.stderr is not None
        words = self._keeper.stderr.read().split()
        return {"error": f"its keeper ended with {self._keeper.wait()}: {' '.join(words[-40:])}"}


def available() -> tuple[bool, str]:
    """Whether this user can have a lab on this machine, found out by making one; and how, or why not."""
    try:
        with Netlab(hosts=1) as lab:
            return True, "in a user namespace" if lab.in_user_namespace else "as root"
    except NetlabError as error:
        return False, str(error)
