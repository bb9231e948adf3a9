"""The helper processes of a launch: `hold`, `enter` and `supervise`.

The launcher executes this file by its path with `python -I -S`. It imports only the standard library, so that a helper
starts in about 15 ms and depends on nothing that the launched program needs.

- `hold` makes the namespaces of a `Netlab` and holds them open until its owner process ends.
- `enter` enters the namespaces of one host and executes the given program.
- `supervise` runs one rank. All processes that the rank started end with the rank or with its launcher.
"""

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


def _prctl(option: int, argument: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, argument, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")


def find_tool(name: str) -> str | None:
    """Path of an administration tool in PATH or in the sbin folders; None: not installed."""
    # iproute2 is often outside the PATH of a user without root privileges.
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin:/usr/local/sbin")


def _namespace_refusal(error: OSError) -> str:
    """The reason why namespaces are refused: the kernel settings that forbid them, if any."""
    forbidding = {
        "/proc/sys/user/max_user_namespaces": "0",
        "/proc/sys/user/max_net_namespaces": "0",
        "/proc/sys/kernel/unprivileged_userns_clone": "0",
        "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1",
    }
    settings = []
    for path, value in forbidding.items():
        with contextlib.suppress(OSError):
            if Path(path).read_text().strip() == value:
                settings.append(f"{path} is {value}")
    reason = ", ".join(settings) or "the policy of the container or of the kernel forbids it"
    return f"not root, and no permission for a user namespace with a network namespace ({error.strerror}: {reason})"


def _unshare_network() -> bool:
    """Move this process to a new network namespace. Returns whether it needed a user namespace too."""
    uid, gid = os.geteuid(), os.getegid()
    try:
        with contextlib.suppress(PermissionError):
            os.unshare(os.CLONE_NEWNET)
            return False
        os.unshare(os.CLONE_NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        os.unshare(os.CLONE_NEWNET)
        return True
    except OSError as error:
        raise OSError(_namespace_refusal(error)) from error


def _batch(tool: str, lines: list[str]) -> None:
    """Run lines of `ip` or `tc` in the current namespace."""
    if (path := find_tool(tool)) is None:
        raise OSError(f"`{tool}` not found: install iproute2")
    done = subprocess.run([path, "-batch", "-"], input="\n".join(lines), text=True, capture_output=True)
    if done.returncode != 0:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise OSError(f"{tool} failed: {message}")


# TCP settings that keep a rate-limited link full while a rank has data to send. BBR sends almost nothing for 200 ms
# every 10 s. CUBIC (HyStart) stops growing its window at the queue before the link: the window then holds 7 ms of
# traffic, and the link idles if a thread waits longer for a core. Measured with four computing ranks on two cores: a
# gather of 380 ms took up to 450 ms with CUBIC and 390 to 405 ms with Reno. The buffers allow a large window.
_TCP = {
    "tcp_congestion_control": "reno",
    "tcp_slow_start_after_idle": "0",
    "tcp_rmem": "4096 8388608 33554432",
    "tcp_wmem": "4096 4194304 33554432",
}


def _set_tcp() -> dict[str, str]:
    """Set TCP up in this network namespace. Returns the settings that /proc/sys refused, with their values."""
    refused = {}
    for key, value in _TCP.items():
        path = Path("/proc/sys/net/ipv4", key)
        try:
            path.write_text(value)
        except OSError:
            if (present := " ".join(path.read_text().split())) != value:
                refused[key] = present
    return refused


def _make_lab(spec: dict[str, Any]) -> dict[str, Any]:
    in_user_namespace = _unshare_network()
    name, mtu, interface = spec["name"], spec["mtu_bytes"], spec["interface"]
    switch = os.open("/proc/self/ns/net", os.O_RDONLY)
    bridge = f"{name}br"
    _batch("ip", [f"link add {bridge} type bridge stp_state 0 forward_delay 0", f"link set {bridge} mtu {mtu} up"])
    hosts: list[int] = []
    tcp_refused: dict[str, str] = {}
    for index, host in enumerate(spec["hosts"]):
        os.unshare(os.CLONE_NEWNET)
        hosts.append(os.open("/proc/self/ns/net", os.O_RDONLY))
        port = f"{name}h{index}"
        os.setns(switch, os.CLONE_NEWNET)
        peer = f"/proc/{os.getpid()}/fd/{hosts[-1]}"
        link = f"link add {port} mtu {mtu} type veth peer name {interface} mtu {mtu} netns {peer}"
        _batch("ip", [link, f"link set {port} master {bridge} up"])
        _batch("tc", [f"qdisc add dev {port} {host['qdisc']}"])
        os.setns(hosts[-1], os.CLONE_NEWNET)
        tcp_refused = _set_tcp()
        # No IPv6: a process cannot bind to a link-local address before duplicate detection ends.
        up = ["link set lo up", f"link set {interface} addrgenmode none"]
        _batch("ip", [*up, f"addr add {host['address']} dev {interface}", f"link set {interface} up"])
        _batch("tc", [f"qdisc add dev {interface} {host['qdisc']}"])
    made = {"pid": os.getpid(), "switch": switch, "hosts": hosts}
    return {**made, "user_namespace": in_user_namespace, "tcp_refused": tcp_refused}


def hold(argv: list[str]) -> int:
    """`hold LABEL SPEC`: make the namespaces of SPEC (JSON), print their description as JSON and hold them open."""
    spec = json.loads(argv[1])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the owner handles Ctrl-C
    try:
        owner = os.pidfd_open(spec["owner"])
        if os.getppid() != spec["owner"]:
            return 1
        answer = _make_lab(spec)
    except OSError as error:
        print(json.dumps({"error": error.strerror or str(error)}), flush=True)
        return 1
    print(json.dumps(answer), flush=True)
    select.select([owner], [], [])  # until the owner ends; it kills this process when it closes the lab
    return 0


def enter(argv: list[str]) -> NoReturn:
    """`enter HOLDER_PID NET_FD USER_NAMESPACE(0|1) PROGRAM ARGS...`: execute PROGRAM in that host."""
    holder, net_fd, in_user_namespace, program = argv[0], argv[1], argv[2] == "1", argv[3:]
    try:
        net = os.open(f"/proc/{holder}/fd/{net_fd}", os.O_RDONLY)
        if in_user_namespace:
            os.setns(os.open(f"/proc/{holder}/ns/user", os.O_RDONLY), os.CLONE_NEWUSER)
        os.setns(net, os.CLONE_NEWNET)  # exec closes both files
    except OSError as error:
        print(f"cannot enter the netlab of process {holder}: {error.strerror}", file=sys.stderr)
        os._exit(126)
    _execute(program)


def _execute(program: list[str]) -> NoReturn:
    # Python ignores these two signals, and exec inherits ignored signals.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot start {program[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _children() -> list[int]:
    me, found = str(os.getpid()), []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            stat = Path("/proc", pid, "stat").read_text()
            if stat.rpartition(")")[2].split()[1] == me:  # the process name before it may contain spaces and brackets
                found.append(int(pid))
    return found


def _end_descendants() -> None:
    """Kill all descendants. Orphans become children of this process, a subreaper, until none is left."""
    while True:
        children = _children()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0 if children else os.WNOHANG)
        except ChildProcessError:
            return


def supervise(argv: list[str]) -> int:
    """`supervise LABEL OWNER_PID STATUS_FD STOP_FD PROGRAM ARGS...`: run one rank.

    Writes `{"code": exit code or -signal, "time": CLOCK_MONOTONIC in seconds}` to STATUS_FD when the rank ends. Kills
    the rank and its descendants when STOP_FD has a byte or when the owner process ends. LABEL names the owner in `ps`.
    """
    owner, status_fd, stop_fd, program = int(argv[1]), int(argv[2]), int(argv[3]), argv[4:]
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher sends it to the process group, for the rank
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
        _execute(program)
    rank_fd = os.pidfd_open(rank)
    poll = select.poll()
    for fd in (owner_fd, stop_fd, rank_fd):
        poll.register(fd, select.POLLIN | select.POLLHUP)
    ready = {fd for fd, _ in poll.poll()}
    if rank_fd not in ready:
        os.kill(rank, signal.SIGKILL)
    _, wait_status = os.waitpid(rank, 0)
    code = os.waitstatus_to_exitcode(wait_status)
    with contextlib.suppress(OSError):  # the launcher may have ended
        os.write(status_fd, json.dumps({"code": code, "time": time.monotonic()}).encode())
    _end_descendants()
    return 0


if __name__ == "__main__":
    sys.exit({"hold": hold, "enter": enter, "supervise": supervise}[sys.argv[1]](sys.argv[2:]))
