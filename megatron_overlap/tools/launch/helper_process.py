"""What runs in the small helper processes of a launch.

The file is executed by its path, with `python -I -S`, and imports the standard library only: a helper is up
in about 15 ms and needs nothing that the launched program needs. Three helpers:

- `keep` makes the namespaces of a `netlab` and holds them open. It ends when its owner ends, however that
  happens, and namespaces without a holder are removed by the kernel.
- `enter` steps into the namespaces of one host and becomes the given program.
- `supervise` runs one rank and leaves nothing behind: no process that the rank started outlives it or its
  launcher.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# iproute2 is often outside an ordinary user's PATH.
_ADMIN_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin")


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def find_tool(name: str) -> str | None:
    """Path of an administrator's tool, looked for in PATH and in the usual sbin folders."""
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *_ADMIN_FOLDERS]))


class _RefusedError(Exception):
    """The lab cannot be made; the text is for a person."""


def _why_no_user_namespace(error: OSError) -> str:
    """Names the kernel setting that forbids what was tried, where one can be seen."""
    forbidding = {
        "/proc/sys/user/max_user_namespaces": "0",
        "/proc/sys/user/max_net_namespaces": "0",
        "/proc/sys/kernel/unprivileged_userns_clone": "0",
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    seen = []
    for path, value in forbidding.items():
        try:
            if Path(path).read_text().strip() == value:
                seen.append(f"{path} is {value}")
        except OSError:
            continue
    because = ", ".join(seen) or "a container's or the kernel's policy forbids it"
    return f"not root, and no user namespace with a network of its own ({error.strerror}: {because})"


def _leave_for_a_network() -> bool:
    """Puts this process in a new network namespace; returns whether that took a user namespace."""
    try:
        os.unshare(os.CLONE_NEWNET)
        return False
    except PermissionError:
        pass
    except OSError as error:
        raise _RefusedError(_why_no_user_namespace(error)) from error
    uid, gid = os.geteuid(), os.getegid()
    try:
        os.unshare(os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        os.unshare(os.CLONE_NEWNET)
    except OSError as error:
        raise _RefusedError(_why_no_user_namespace(error)) from error
    return True


def _batch(tool: str, lines: list[str]) -> None:
    """Runs lines of `ip` or `tc` in the namespace this process is in."""
    path = find_tool(tool)
    if path is None:
        raise _RefusedError(f"`{tool}` not found: install iproute2")
    done = subprocess.run([path, "-batch", "-"], input="\n".join(lines), text=True, capture_output=True)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        if any("netem" in line for line in lines):
            message += "; latency_ms needs a kernel with netem (module sch_netem)"
        raise _RefusedError(f"{tool} failed: {message}")


# A link that is full while there is something to send, as a cluster's are. BBR, some machines' choice, sends next to
# nothing for 200 ms every 10 s. CUBIC takes the queue before the link for a sign to stop growing (HyStart): its window
# then holds 7 ms of traffic, and the link stands still whenever a thread waits longer for a core (four computing ranks
# on two cores: a gather of 380 ms took up to 450, and 390 to 405 with Reno). Buffers have room for a large window.
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 8388608 33554432",
    "tcp_wmem": "4096 4194304 33554432",
}


def _set_tcp() -> dict[str, str]:
    """Sets TCP up in this network namespace; returns what stayed as it was, as /proc/sys may be read-only."""
    kept = {}
    for key, value in _TCP.items():
        path = Path("/proc/sys/net/ipv4", key)
        try:
            path.write_text(value)
        except OSError:
            stays = " ".join(path.read_text().split())
            if stays != value:
                kept[key] = stays
    return kept


def _make_lab(spec: dict[str, Any]) -> dict[str, Any]:
    in_user_namespace = _leave_for_a_network()
    name, mtu = spec["name"], spec["mtu_bytes"]
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)
    bridge = f"{name}br"
    _batch(
        "ip",
        [f"link add {bridge} type bridge stp_state 0 forward_delay 0", f"link set {bridge} mtu {mtu} up"],
    )
    hosts: list[int] = []
    tcp_kept: dict[str, str] = {}
    for index, host in enumerate(spec["hosts"]):
        os.unshare(os.CLONE_NEWNET)
        hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        port = f"{name}h{index}"
        os.setns(switch, os.CLONE_NEWNET)
        peer = f"/proc/{os.getpid()}/fd/{hosts[-1]}"
        _batch(
            "ip",
            [
                f"link add {port} mtu {mtu} type veth peer name {spec['interface']} mtu {mtu} netns {peer}",
                f"link set {port} master {name}br up",
            ],
        )
        _batch("tc", [f"qdisc add dev {port} {line}" for line in host["in_qdiscs"]])
        os.setns(hosts[-1], os.CLONE_NEWNET)
        tcp_kept = _set_tcp()
        _batch(
            "ip",
            [
                "link set lo up",
                # No IPv6: a link-local address that is still being checked cannot be bound to.
                f"link set {spec['interface']} addrgenmode none",
                f"addr add {host['address']} dev {spec['interface']}",
                f"link set {spec['interface']} up",
            ],
        )
        _batch("tc", [f"qdisc add dev {spec['interface']} {line}" for line in host["out_qdiscs"]])
    for index, host in enumerate(spec["hosts"]):
        if host["mates"]:
            _join_node(spec, index, switch, hosts[index])
    return {
        "pid": os.getpid(),
        "switch": switch,
        "hosts": hosts,
        "user_namespace": in_user_namespace,
        "tcp_kept": tcp_kept,
    }


def _join_node(spec: dict[str, Any], index: int, switch: int, net: int) -> None:
    """A second link of a host, to the switch of its node. It has no address of its own: routes say who is there."""
    host, name, mtu, interface = spec["hosts"][index], spec["name"], spec["mtu_bytes"], spec["inside_interface"]
    bridge, port = f"{name}n{host['node']}", f"{name}i{index}"
    os.setns(switch, os.CLONE_NEWNET)
    lines = [
        f"link add {port} mtu {mtu} type veth peer name {interface} mtu {mtu} netns /proc/{os.getpid()}/fd/{net}",
        f"link set {port} master {bridge} up",
    ]
    if index == 0 or spec["hosts"][index - 1]["node"] != host["node"]:
        lines[:0] = [
            f"link add {bridge} type bridge stp_state 0 forward_delay 0",
            f"link set {bridge} mtu {mtu} up",
        ]
    _batch("ip", lines)
    _batch("tc", [f"qdisc add dev {port} {line}" for line in spec["inside_qdiscs"]])
    os.setns(net, os.CLONE_NEWNET)
    own = host["address"].partition("/")[0]
    _batch(
        "ip",
        [
            f"link set {interface} addrgenmode none",
            f"link set {interface} up",
            *(f"route add {mate}/32 dev {interface} src {own}" for mate in host["mates"]),
        ],
    )
    _batch("tc", [f"qdisc add dev {interface} {line}" for line in spec["inside_qdiscs"]])


def keep(argv: list[str]) -> int:
    """`keep LABEL SPEC`: makes the lab of SPEC (JSON), answers with one of JSON, holds it for its owner."""
    spec = json.loads(argv[1])
    # Ctrl-C is the owner's to handle; it closes our input when done.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        owner = os.pidfd_open(spec["owner"])
        if os.getppid() != spec["owner"]:
            return 1
        answer = _make_lab(spec)
    except _RefusedError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"{error.strerror or error}"}
    print(json.dumps(answer), flush=True)
    if "error" in answer:
        return 1
    # The input closes when the owner is done. A process the owner forked may hold a copy of it: hence the
    # pidfd too.
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    poll.register(owner, select.POLLIN)
    poll.poll()
    return 0


def enter(argv: list[str]) -> NoReturn:
    """`enter KEEPER_PID NET_FD USER_NAMESPACE(0|1) PROGRAM ARGS...`: becomes PROGRAM in that host."""
    keeper, net_fd, in_user_namespace, program = argv[0], argv[1], argv[2] == "1", argv[3:]
    try:
        net = os.open(f"/proc/{keeper}/fd/{net_fd}", os.O_RDONLY)
        if in_user_namespace:
            user = os.open(f"/proc/{keeper}/ns/user", os.O_RDONLY)
            os.setns(user, os.CLONE_NEWUSER)
            os.close(user)
        os.setns(net, os.CLONE_NEWNET)
        os.close(net)
    except OSError as error:
        print(f"cannot enter the netlab of process {keeper}: {error.strerror}", file=sys.stderr)
        os._exit(126)
    _become(program)


def _become(program: list[str]) -> NoReturn:
    # Python ignores these two, and what is ignored stays ignored across exec.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot start {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path("/proc", entry, "stat").read_text()
            except OSError:
                continue
            if stat.rpartition(")")[2].split()[1] == me:  # the name before it may hold spaces and brackets
                found.append(int(entry))
    return found


def _end_descendants() -> None:
    """Kills all below this process. It is the reaper of orphans, so they come up to it until none is left."""
    while True:
        children = _children()
        for pid in children:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return


def supervise(argv: list[str]) -> int:
    """`supervise LABEL OWNER_PID STATUS_FD STOP_FD PROGRAM ARGS...`: runs the rank.

    Writes `{"code": exit code or -signal, "time": CLOCK_MONOTONIC in seconds}` to STATUS_FD as the rank ends.
    The rank and all it started are killed when a byte comes from STOP_FD, or the owner's process ends. LABEL is for
    `leftovers` and for people who read `ps`.
    """
    owner, status_fd, stop_fd, program = int(argv[1]), int(argv[2]), int(argv[3]), argv[4:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to the whole process group: meant for the rank
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner_fd = os.pidfd_open(owner)
    if os.getppid() != owner:
        return 1
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    os.set_inheritable(status_fd, False)
    os.set_inheritable(stop_fd, False)
    me = os.getpid()
    rank = os.fork()
    if rank == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != me:
            os._exit(1)
        _become(program)
    rank_fd = os.pidfd_open(rank)
    poll = select.poll()
    for fd in (owner_fd, stop_fd, rank_fd):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    ready = {fd for fd, _ in poll.poll()}
    if rank_fd not in ready:
        os.kill(rank, signal.SIGKILL)
    _, wait_status = os.waitpid(rank, 0)
    code = os.waitstatus_to_exitcode(wait_status)
    with contextlib.suppress(OSError):  # the launcher may be gone
        os.write(status_fd, json.dumps({"code": code, "time": time.monotonic()}).encode())
    _end_descendants()
    return 0


if __name__ == "__main__":
    _COMMANDS = {"keep": keep, "enter": enter, "supervise": supervise}
    sys.exit(_COMMANDS[sys.argv[1]](sys.argv[2:]))
