"""A `python` whose programs are forks of the server of `tests.helpers.forked`, for tests of programs that start ranks.

Such a program starts its ranks with `sys.executable`, which the test replaces. The process that it starts is a short
one that stands for the fork: it has the pid, and ends with the exit code or by the signal of the fork. The fork takes
over its arguments, environment, folder, output and namespaces, and is killed when it ends. glibc reads no variable of
the environment again, so settings of malloc have no effect.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import shutil
import socket
import sys
import tempfile
import threading
from multiprocessing.connection import wait
from pathlib import Path

from tests.helpers.forked import run
from tests.helpers.world import server

# A program after an option of Python, such as the helper process of a launch, runs in the process itself. torchrun asks
# for -u, which changes the buffers alone: the fork leaves it out.
_PROGRAM = """#!{python} -IS
import os, socket, sys
if sys.argv[1] not in ("-m", "-c", "-u") and sys.argv[1].startswith("-"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    server.sendall(str(os.getpid()).encode())
    code = int(server.recv(16))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
_CLI = "import sys; sys.executable = sys.argv.pop(1); from megatron_overlap.cli import main; sys.exit(main())"
_SCRIPT = """import os, runpy, sys
sys.executable, *sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
runpy.run_path(os.path.abspath(sys.argv[0]), run_name="__main__")"""


class ForkedPython:
    """Serves the forks until `close`.

    Attributes:
        executable: the path of the program, for `sys.executable`.
        cli: the command `megatron-overlap` with this executable.
        script: `python` with this executable, for a script.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="python-"))
        self.executable = str(self._folder / "python")
        self.cli = [sys.executable, "-B", "-c", _CLI, self.executable]
        self.script = [sys.executable, "-B", "-c", _SCRIPT, self.executable]
        address = str(self._folder / "socket")
        Path(self.executable).write_text(_PROGRAM.format(python=sys.executable, address=address))
        Path(self.executable).chmod(0o755)
        self._starting = threading.Lock()  # `server` replaces a function of multiprocessing
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(address)
        self._listener.listen(64)
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Start no more forks."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self._folder)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._keep, args=(connection,), daemon=True).start()

    def _keep(self, connection: socket.socket) -> None:
        """Run one fork to its end, or to the end of the process that stands for it."""
        with connection:
            pid = connection.recv(16)
            if not pid:
                return
            process = mp.get_context("forkserver").Process(target=_take_over, args=(int(pid),))
            with self._starting, server("rank"):
                process.start()
            if process.sentinel in wait([process.sentinel, connection]):
                process.join()
                connection.sendall(str(process.exitcode).encode())
            else:
                process.kill()
                process.join()


def _take_over(pid: int) -> None:
    """Run the program of a process in a fork."""
    process = Path("/proc", str(pid))
    # python -IS SCRIPT WORDS. A program of this one starts as a fork, too.
    _, _, sys.executable, *words = process.joinpath("cmdline").read_text().split("\0")[:-1]
    if words[0] == "-u":
        del words[0]
    variables = process.joinpath("environ").read_text().split("\0")[:-1]
    folder = os.readlink(process / "cwd")
    for name, kind in (("user", os.CLONE_NEWUSER), ("net", os.CLONE_NEWNET)):
        if os.readlink(process / "ns" / name) != os.readlink(f"/proc/self/ns/{name}"):
            os.setns(os.open(process / "ns" / name, os.O_RDONLY), kind)
    program = words[: 2 if words[0].startswith("-") else 1]
    environment = dict(each.split("=", 1) for each in variables)
    run(program, words[len(program) :], environment, folder, str(process / "fd" / "1"), str(process / "fd" / "2"))
