"""Several hosts on one Linux machine: network namespaces joined by a bridge, each with a rate-limited link.

A helper process, the holder, holds the namespaces open. It ends when its owner ends, and the kernel then removes the
namespaces with their interfaces and queues: a crash needs no clean-up. The bridge has its own namespace too, so the
interfaces, addresses and routes of the machine do not change.
"""

import ipaddress
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

HELPER = (sys.executable, "-I", "-S", str(Path(__file__).with_name("helper_process.py")))
INTERFACE = "eth0"
# Jumbo frames: headers take 0.7 % of the rate, against 4.4 % with frames of 1500 bytes.
MTU_BYTES = 9000
_NETWORK = ipaddress.ip_network("10.77.0.0/16")


def owner_label() -> str:
    """The word on the command line of a helper that names its owner, for people who read `ps`."""
    return f"megatron_overlap:mo{os.getpid()}:"


class NetlabError(RuntimeError):
    """The lab cannot be made; the text is the reason."""


@dataclass(frozen=True)
class Link:
    """The link of one host, equal in both directions."""

    gbps: float  # rate in Gbit/s (10^9 bits per second), headers included

    @property
    def burst_bytes(self) -> int:
        """Size of the token bucket, which passes without a limit."""
        # 0.5 ms of data, so that a late timer does not reduce the rate. At least one full segment of TCP offload, so
        # that the kernel does not split segments.
        return max(64 * 1024, int(self.gbps * 1e9 / 8 * 0.5e-3))

    @property
    def qdisc(self) -> str:
        """The arguments of `tc qdisc add dev DEVICE` for either end of the link."""
        return f"root tbf rate {round(self.gbps * 1e9)}bit burst {self.burst_bytes}b latency 400ms"


class Netlab:
    """Context manager: `hosts` hosts, each with its own rate-limited `Link`, which `ranks_per_host` ranks share.

    Raises NetlabError on entering, if the machine or the user's rights do not allow a lab, or if the lab is open.

    Example:
        with Netlab(hosts=2, gbps=1.0) as lab:
            subprocess.run(lab.wrap(0, ["ip", "addr"]), env=os.environ | lab.env(0))
    """

    def __init__(self, hosts: int, gbps: float = 1.0, ranks_per_host: int = 1) -> None:
        self.hosts, self.ranks_per_host = hosts, ranks_per_host
        self.links = (Link(gbps),) * hosts
        self.name = f"mo{os.getpid()}"
        # Whether the lab uses a user namespace, without root privileges. Programs inside then have user id 0.
        self.in_user_namespace = False
        # TCP settings of the namespaces that the machine refused, with their present values.
        self.tcp_refused: dict[str, str] = {}
        self._holder: subprocess.Popen[str] | None = None
        self._made: dict[str, Any] = {}

    def host_of(self, rank: int) -> int:
        """Host of a rank. Consecutive ranks share a host."""
        return rank // self.ranks_per_host

    def host_name(self, host: int) -> str:
        return f"{self.name}h{host}"

    def address(self, host: int) -> str:
        """IPv4 address of a host, valid inside the lab."""
        return str(_NETWORK[host + 1])

    def env(self, host: int) -> dict[str, str]:
        """Environment variables that make torch.distributed use the network of the lab on that host."""
        interfaces = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), INTERFACE)
        return {**interfaces, "MASTER_ADDR": self.address(0)}

    def wrap(self, host: int | None, argv: Sequence[str]) -> list[str]:
        """A command line that executes `argv` on that host, with the same pid; None: in the namespace of the bridge.

        Raises NetlabError if the lab is not open.
        """
        if not self._made:
            raise NetlabError("the lab is not open")
        net_fd = self._made["switch"] if host is None else self._made["hosts"][host]
        return [*HELPER, "enter", str(self._made["pid"]), str(net_fd), str(int(self.in_user_namespace)), *argv]

    def __enter__(self) -> Self:
        self.open()
        return self

    def open(self) -> None:
        if sys.platform != "linux":
            raise NetlabError(f"needs Linux; this is {sys.platform}")
        if self._holder is not None:
            raise NetlabError("the lab is already open")
        command, pipe = [*HELPER, "hold", owner_label(), json.dumps(self._spec())], subprocess.PIPE
        self._holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True)
        try:
            assert self._holder.stdout is not None
            assert self._holder.stderr is not None
            answer = self._holder.stdout.readline().strip()
            if not answer:
                words = " ".join(self._holder.stderr.read().split()[-40:])
                raise NetlabError(f"the holder process ended with exit code {self._holder.wait()}: {words}")
            made = json.loads(answer)
            if "error" in made:
                raise NetlabError(made["error"])
        except BaseException:
            self.close()
            raise
        self._made, self.in_user_namespace, self.tcp_refused = made, made["user_namespace"], made["tcp_refused"]
        if self.tcp_refused and self.hosts > 1:
            refused = ", ".join(f"{key} is {value}" for key, value in self.tcp_refused.items())
            effect = "links may idle at times, and measured times vary more; see docs/netlab.md"
            warnings.warn(f"netlab: the machine refuses TCP settings ({refused}): {effect}", stacklevel=2)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the holder. The kernel removes the namespaces with the last program inside. May be called twice."""
        holder, self._holder, self._made = self._holder, None, {}
        if holder is not None:
            with holder:  # closes the pipes and waits for the end
                holder.kill()  # it has no state to save

    def _spec(self) -> dict[str, Any]:
        hosts = [
            {"address": f"{self.address(host)}/{_NETWORK.prefixlen}", "qdisc": link.qdisc}
            for host, link in enumerate(self.links)
        ]
        lab = {"owner": os.getpid(), "name": self.name, "interface": INTERFACE, "mtu_bytes": MTU_BYTES}
        return lab | {"hosts": hosts}
