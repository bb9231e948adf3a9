"""Netlab on real namespaces and sockets: rates, isolation, clean-up and privileges. Runs with and without root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_overlap.tools.launch.netlab import Link, Netlab, NetlabError
from megatron_overlap.tools.launch.processes import run_workers
from scripts.bench.nodes import NodesLab
from tests.helpers.netlab import available
from tests.tools.launch.watch import helpers_of, holders, still_held, wait_for

AVAILABLE_HERE, REASON = available()
pytestmark = pytest.mark.skipif(not AVAILABLE_HERE, reason=f"this machine cannot make a netlab: {REASON}")

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
TRAFFIC = [sys.executable, str(HERE / "traffic.py")]


def goodput_gbps(lab: Netlab, gbps: float, both: bool = False, seconds: float = 1.0, source: int = 1) -> float:
    """Payload rate from a host to host 0; with `both`, of each of the two directions at once."""
    num_bytes = int(gbps * 1e9 / 8 * seconds)
    mode = ["both"] if both else ["one"]
    server = subprocess.Popen(
        lab.wrap(0, [*TRAFFIC, "serve", str(num_bytes), *mode]), stdout=subprocess.PIPE, text=True
    )
    assert server.stdout is not None
    try:
        assert server.stdout.readline() == "listening\n"
        subprocess.run(
            lab.wrap(source, [*TRAFFIC, "send", lab.address(0), str(num_bytes), *mode]), check=True, timeout=60
        )
        return num_bytes * 8 / 1e9 / float(server.stdout.readline())
    finally:
        server.kill()
        server.communicate()


def net_of(lab: Netlab, host: int) -> str:
    done = subprocess.run(lab.wrap(host, ["readlink", "/proc/self/ns/net"]), capture_output=True, text=True, check=True)
    return done.stdout.strip()


def is_limited(measured_gbps: float, gbps: float) -> bool:
    """The rate may be below the limit on a busy machine, but not above it."""
    return 0.5 * gbps < measured_gbps < 1.07 * gbps


@pytest.mark.parametrize("gbps", [0.4, pytest.param(1.0, marks=pytest.mark.long), 2.0])
def test_a_link_has_its_rate(gbps: float) -> None:
    with Netlab(hosts=2, gbps=gbps) as lab:
        assert is_limited(goodput_gbps(lab, gbps), gbps)


def test_both_directions_have_the_rate_at_once() -> None:
    with Netlab(hosts=2, gbps=1.0) as lab:
        assert is_limited(goodput_gbps(lab, 1.0, both=True), 1.0)


def test_incoming_traffic_of_a_host_is_limited() -> None:
    """The link of host 1 is faster than that of host 0."""
    lab = Netlab(hosts=2)
    lab.links = Link(0.3), Link(3.0)
    with lab:
        assert is_limited(goodput_gbps(lab, 0.3), 0.3)


def test_the_burst_does_not_hide_a_short_message() -> None:
    """The burst must be small against training messages, or the link would not limit short messages."""
    with Netlab(hosts=2, gbps=0.4) as lab:
        # A receiver that gets a core late starts its clock late, so take the slowest of three.
        assert min(goodput_gbps(lab, 0.4, seconds=0.0105) for _ in range(3)) < 0.4 * 1.2  # 512 KiB


def test_hosts_of_a_node_have_an_intra_node_link() -> None:
    """Intra-node traffic has the intra-node rate; inter-node traffic has the rate of the host's NIC."""
    with NodesLab(hosts=4, gbps=0.1, hosts_per_node=2, intra_node_gbps=0.8) as lab:
        inside = max(goodput_gbps(lab, 0.8, seconds=0.3, source=1) for _ in range(3))
        between = goodput_gbps(lab, 0.1, source=2)
        # On a busy machine both may be far below their limits.
        assert 0.12 < inside < 0.84
        assert between < 0.104
        for host, peer in enumerate((1, 0, 3, 2)):
            routes = subprocess.run(lab.wrap(host, ["ip", "route"]), capture_output=True, text=True, check=True).stdout
            assert [line.split()[0] for line in routes.splitlines() if "dev eth1" in line] == [lab.address(peer)]


def test_gloo_uses_the_links(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "rank = dist.get_rank()\n"
        "full = torch.empty(2 << 20)\n"
        "dist.all_gather_into_tensor(full, torch.full((1 << 20,), float(rank)))\n"
        "assert full[0] == 0 and full[-1] == 1, full\n"
        "dist.barrier()\n"
        "start = time.monotonic()\n"
        "peer = 1 - rank\n"
        "dist.send(full[: 1 << 20], peer) if rank else dist.recv(full[: 1 << 20], peer)\n"
        "print('seconds', time.monotonic() - start, os.environ['LOCAL_RANK'])\n"
        "dist.destroy_process_group()\n"
    )
    lines: list[str] = []
    with Netlab(hosts=2, gbps=0.4) as lab:
        run_workers(script, [], 2, lab=lab, timeout_s=60, on_line=lambda rank, line: lines.append(f"{rank} {line}"))
    seconds = next(float(line.split()[2]) for line in lines if line.startswith("0 seconds"))
    assert is_limited(4 * (1 << 20) * 8 / 1e9 / seconds, 0.4)


def test_ranks_of_one_host_share_its_address() -> None:
    with Netlab(hosts=2, ranks_per_host=2) as lab:
        assert [lab.host_of(rank) for rank in range(4)] == [0, 0, 1, 1]
        assert net_of(lab, 0) != net_of(lab, 1)
        shown = subprocess.run(lab.wrap(1, ["ip", "-br", "addr"]), capture_output=True, text=True, check=True).stdout
        assert f"{lab.address(1)}/16" in shown
        assert lab.env(1)["MASTER_ADDR"] == lab.address(0)


def test_loopback_is_up_inside() -> None:
    with Netlab(hosts=1) as lab:
        code = "import socket; s = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname())"
        subprocess.run(lab.wrap(0, [sys.executable, "-c", code]), check=True, timeout=20)


def test_the_network_of_the_machine_does_not_change() -> None:
    def addresses() -> str:
        command = ["ip", "-o", "addr"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    before = addresses()
    with Netlab(hosts=3):
        assert addresses() == before
    assert addresses() == before


def test_names_contain_the_pid_of_the_owner() -> None:
    with Netlab(hosts=2) as lab:
        command = lab.wrap(None, ["ip", "-br", "link"])
        shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for host in range(2):
            assert f"mo{os.getpid()}h{host}@" in shown
            assert lab.host_name(host) == f"mo{os.getpid()}h{host}"
        assert helpers_of(os.getpid())


def test_simultaneous_labs_are_isolated() -> None:
    with Netlab(hosts=2, gbps=0.4) as first:
        with Netlab(hosts=2, gbps=1.0) as second:
            assert net_of(first, 0) != net_of(second, 0)
            assert is_limited(goodput_gbps(second, 1.0, seconds=0.5), 1.0)
        assert is_limited(goodput_gbps(first, 0.4, seconds=0.5), 0.4)


def test_close_removes_namespaces_and_helpers() -> None:
    lab = Netlab(hosts=2)
    with lab:
        namespaces = [net_of(lab, 0), net_of(lab, 1)]
        holder_pids = [holders(namespace) for namespace in namespaces]
        assert all(holder_pids)
        with pytest.raises(NetlabError, match="already open"):
            lab.open()
    lab.close()
    assert not any(map(still_held, namespaces, holder_pids))
    assert helpers_of(os.getpid()) == []
    with pytest.raises(NetlabError, match="not open"):
        lab.wrap(0, ["true"])
    with pytest.raises(NetlabError, match="not open"):
        lab.wrap(None, ["true"])


OWNER = """
import os, signal, subprocess, sys
from megatron_overlap.tools.launch.netlab import Netlab
lab = Netlab(hosts=2)
lab.open()
forked = os.fork()  # has copies of the owner's pipes and outlives it
if forked == 0:
    signal.pause()
done = subprocess.run(lab.wrap(0, ["readlink", "/proc/self/ns/net"]), capture_output=True, text=True)
print(forked, done.stdout.strip(), flush=True)
signal.pause()
"""


def start_owner() -> tuple[subprocess.Popen[str], int, str]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert owner.stdout is not None
    forked, namespace = owner.stdout.readline().split()
    return owner, int(forked), namespace


def end(owner: subprocess.Popen[str]) -> None:
    """Kill the owner. Its output is not read to the end: its forked process holds the pipe open."""
    owner.kill()
    owner.wait(timeout=10)
    assert owner.stdout is not None
    owner.stdout.close()


def test_a_killed_owner_leaves_no_helper_and_no_namespace() -> None:
    owner, forked, namespace = start_owner()
    try:
        holder_pids = holders(namespace)
        assert holder_pids == helpers_of(owner.pid)
        end(owner)
        assert wait_for(lambda: not helpers_of(owner.pid) and not still_held(namespace, holder_pids))
    finally:
        os.kill(forked, signal.SIGKILL)


# Root without network capabilities, as in most containers. It can read a Python that root installed. The kernel needs
# setfcap to map user 0 to user 0 of a namespace.
NO_NETWORK_CAPABILITIES = [
    "setpriv",
    "--bounding-set=-all,+setfcap",
    "--inh-caps=-all,+setfcap",
    "--ambient-caps=-all,+setfcap",
]
UNPRIVILEGED_USER = [
    *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"),
    # dac_read_search allows it to read root's Python.
    *("--bounding-set=-all,+dac_read_search", "--inh-caps=-all,+dac_read_search", "--ambient-caps=+dac_read_search"),
]


def unprivileged(setpriv: list[str], code: str) -> list[str]:
    """The output lines of code that runs without root privileges. A test without root keeps its user."""
    prefix = setpriv if os.geteuid() == 0 else []
    command = [*prefix, sys.executable, "-B", "-c", f"from tests.tools.launch.test_netlab import *\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_without_network_capabilities_the_lab_uses_a_user_namespace() -> None:
    code = "with Netlab(2, 0.5) as lab: print(lab.in_user_namespace, goodput_gbps(lab, 0.5))"
    in_user_namespace, rate = unprivileged(NO_NETWORK_CAPABILITIES, code)[0].split()
    assert in_user_namespace == "True"
    assert is_limited(float(rate), 0.5)


DEATH_SIGNAL = "import ctypes; s = ctypes.c_int(); ctypes.CDLL(None).prctl(2, ctypes.byref(s)); print(s.value)"


def test_entering_a_user_namespace_keeps_the_death_signal() -> None:
    """Some changes of credentials clear the signal; a rank must end with its supervisor inside a lab too."""
    code = (
        "import ctypes\n"
        "set_it = lambda: ctypes.CDLL(None).prctl(1, 9)\n"
        "with Netlab(1) as lab:\n"
        f"    subprocess.run(lab.wrap(0, [sys.executable, '-c', {DEATH_SIGNAL!r}]), check=True, preexec_fn=set_it)\n"
    )
    assert unprivileged(NO_NETWORK_CAPABILITIES, code) == ["9"]


def test_an_unprivileged_user_can_make_a_lab() -> None:
    code = (
        "print(os.geteuid(), *available(), sep='|')\n"
        "with Netlab(2, 0.5) as lab:\n"
        "    subprocess.run(lab.wrap(1, ['ip', '-br', 'addr', 'show', 'eth0']), check=True)\n"
    )
    user, shown = unprivileged(UNPRIVILEGED_USER, code)
    assert user.split("|")[0] != "0"
    assert user.split("|")[1:] == ["True", "in a user namespace"]
    assert "UP" in shown
    assert "10.77.0.2/16" in shown


def under_limits(limits: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in a new user namespace after the shell commands `limits`."""
    shell = ["unshare", "-Urm", "sh", "-c", f'{limits}; exec "$@"', "sh", *command]
    return subprocess.run(shell, capture_output=True, text=True, cwd=ROOT, timeout=60)


NO_NAMESPACES = "echo 0 > /proc/sys/user/max_user_namespaces; echo 0 > /proc/sys/user/max_net_namespaces"
AVAILABLE = [
    sys.executable,
    "-B",
    "-c",
    "from tests.helpers.netlab import available; print(*available(), sep='|')",
]


def test_a_kernel_that_forbids_namespaces_is_named() -> None:
    done = under_limits(NO_NAMESPACES, AVAILABLE)
    possible, reason = done.stdout.strip().split("|")
    assert possible == "False"
    assert "/proc/sys/user/max_net_namespaces is 0" in reason


SHOW_TCP = "import pathlib; print(*pathlib.Path('/proc/sys/net/ipv4/tcp_congestion_control').read_text().split())"


def test_hosts_use_reno_congestion_control() -> None:
    """With CUBIC or BBR a link idles at times, and measured ratios vary more."""
    with Netlab(hosts=2, gbps=0.5) as lab:
        inside = lab.wrap(1, [sys.executable, "-c", SHOW_TCP])
        assert subprocess.run(inside, capture_output=True, text=True, check=True).stdout == "reno\n"
        assert lab.tcp_refused == {}


def test_refused_tcp_settings_are_reported() -> None:
    code = (
        "from megatron_overlap.tools.launch.netlab import Netlab\n"
        "with Netlab(2, 0.5) as lab: print(sorted(lab.tcp_refused))"
    )
    read_only = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys"
    done = under_limits(read_only, [sys.executable, "-B", "-c", code])
    assert "tcp_wmem" in done.stdout, done.stderr
    assert "netlab: the machine refuses TCP settings" in done.stderr


@pytest.mark.parametrize("tool", ["ip", "tc"])
def test_missing_iproute2_is_named(tool: str, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = {"ip": "tc", "tc": "ip"}[tool]
    found = shutil.which(other, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert found is not None
    (tmp_path / "tools").mkdir()
    shutil.copy(found, tmp_path / "tools" / other)
    hide = f"mount --bind {empty} /usr/sbin; mount --bind {empty} /usr/local/sbin; export PATH={tmp_path}/tools"
    done = under_limits(hide, AVAILABLE)
    assert done.stdout.strip() == f"False|`{tool}` not found: install iproute2", done.stderr
