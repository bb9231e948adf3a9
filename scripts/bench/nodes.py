"""Emulated nodes of several hosts: a `Netlab` whose hosts of one node also share an intra-node switch.

Each host is one device with one NIC, its link of the lab, for inter-node traffic. Routes select the second link for the
other hosts of the node.
"""

from __future__ import annotations

import subprocess

from megatron_overlap.tools.launch.helper_process import find_tool
from megatron_overlap.tools.launch.netlab import MTU_BYTES, Link, Netlab, NetlabError

INTERFACE = "eth1"


class NodesLab(Netlab):
    """Context manager: `hosts` hosts in nodes of `hosts_per_node`.

    Args:
        hosts: number of hosts.
        gbps: rate of every host's link between nodes in Gbit/s.
        hosts_per_node: number of consecutive hosts that form one node.
        intra_node_gbps: rate of each host's link to the switch of its node in Gbit/s.
    """

    def __init__(self, hosts: int, gbps: float, hosts_per_node: int, intra_node_gbps: float) -> None:
        super().__init__(hosts, gbps)
        if hosts_per_node < 2 or hosts % hosts_per_node:
            raise ValueError(f"hosts_per_node: {hosts_per_node}: must be at least 2 and divide the {hosts} hosts")
        self._hosts_per_node, self._link = hosts_per_node, Link(intra_node_gbps)

    def open(self) -> None:
        """See `Netlab.open`."""
        super().open()
        try:
            for host in range(self.hosts):
                self._join_node(host)
        except BaseException:
            self.close()
            raise

    def _join_node(self, host: int) -> None:
        """Add a second link from a host to the switch of its node."""
        node, place = divmod(host, self._hosts_per_node)
        bridge, port, mtu = f"{self.name}n{node}", f"{self.name}i{host}", MTU_BYTES
        namespace = f"/proc/{self._made['pid']}/fd/{self._made['hosts'][host]}"
        lines = [
            f"link add {port} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} netns {namespace}",
            f"link set {port} master {bridge} up",
        ]
        if place == 0:
            new = f"link add {bridge} type bridge stp_state 0 forward_delay 0"
            lines[:0] = [new, f"link set {bridge} mtu {mtu} up"]
        _batch(self.wrap(None, [_tool("ip"), "-batch", "-"]), lines)
        first = host - place
        peers = [peer for peer in range(first, first + self._hosts_per_node) if peer != host]
        routes = [f"route add {self.address(peer)}/32 dev {INTERFACE} src {self.address(host)}" for peer in peers]
        up = [f"link set {INTERFACE} addrgenmode none", f"link set {INTERFACE} up"]
        _batch(self.wrap(host, [_tool("ip"), "-batch", "-"]), [*up, *routes])
        for side, end in ((None, port), (host, INTERFACE)):
            _batch(self.wrap(side, [_tool("tc"), "-batch", "-"]), [f"qdisc add dev {end} {self._link.qdisc}"])


def _tool(name: str) -> str:
    path = find_tool(name)
    if path is None:
        raise NetlabError(f"`{name}` not found: install iproute2")
    return path


def _batch(command: list[str], lines: list[str]) -> None:
    done = subprocess.run(command, input="\n".join(lines), text=True, capture_output=True)
    if done.returncode != 0:
        raise NetlabError(" ".join(done.stderr.split()) or f"exit code {done.returncode}")
