"""Persistent worker processes: a test runs a function on all ranks of a group and gets the result of each."""

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib
import json
import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 4)
_START_S = 90
"""Time for the server to import torch or Megatron on a busy machine, added to the deadline of the first call."""

_PRELOADED = {
    "interpreted": ["tests.helpers.interpreted"],
    "adapted": ["tests.helpers.adapted"],
    "te": ["tests.helpers.adapted_te"],
    "rank": ["tests.helpers.world", "tests.helpers.rank_imports"],
}
"""Imports of the workers by their kind.

`rank` is the kind of a plain `World` and of `tests.helpers.forked`, so that torch is imported once for both."""


class _Servers:
    """The server process of each kind that has run.

    Attributes:
        folder: the workers of pytest-xdist publish their servers there; None: this process starts its own servers.
    """

    def __init__(self) -> None:
        self.folder: Path | None = None
        self._found: dict[str, forkserver.ForkServer] = {}

    def get(self, kind: str) -> forkserver.ForkServer:
        if kind not in self._found:
            self._found[kind] = _start(kind) if self.folder is None else _join(kind, self.folder)
        return self._found[kind]


SERVERS = _Servers()


class _JoinedServer(forkserver.ForkServer):
    """The server that another process of the test run has started. It ends after both processes."""

    def __init__(self, owner: int, alive: int, **attributes: str) -> None:
        super().__init__()
        vars(self).update(attributes, _forkserver_alive_fd=os.open(f"/proc/{owner}/fd/{alive}", os.O_WRONLY))
        if "_forkserver_authkey" in attributes:
            self._forkserver_authkey = bytes.fromhex(attributes["_forkserver_authkey"])

    def ensure_running(self) -> None:
        """It runs: this process holds its pipe."""


def _start(kind: str) -> forkserver.ForkServer:
    started = forkserver.ForkServer()
    started.set_forkserver_preload(_PRELOADED[kind])
    started.ensure_running()
    return started


def _join(kind: str, folder: Path) -> forkserver.ForkServer:
    """The server of the process that asks first, with its socket in `folder`; an own one if that process has ended."""
    with (folder / f"{kind}-server.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        with contextlib.suppress(ValueError, OSError):
            return _JoinedServer(**json.load(file))
        with patch("multiprocessing.util.get_temp_dir", return_value=str(folder)):
            started = _start(kind)
        own = {"owner": os.getpid(), "alive": started._forkserver_alive_fd}
        own["_forkserver_address"] = started._forkserver_address
        if (key := getattr(started, "_forkserver_authkey", None)) is not None:  # since Python 3.14
            own["_forkserver_authkey"] = key.hex()
        file.truncate(0)
        json.dump(own, file)
        return started


class World:
    """Four processes joined by gloo over loopback, with a group of the first n for every n.

    They are forks of a server process, which imports torch once for all worlds of the test run.

    Args:
        size: processes.
        answer_s: deadline of one call in seconds.
        sizes: the sizes of groups.
        interpreted: Triton is its interpreter (`tests.helpers.interpreted`).
        adapted: Megatron is imported and adapted (`tests.helpers.adapted`).
        te: as `adapted`, with TransformerEngine (`tests.helpers.adapted_te`).
    """

    def __init__(
        self,
        size: int = max(SIZES),
        *,
        answer_s: float = 30,
        sizes: Sequence[int] | None = None,
        interpreted: bool = False,
        adapted: bool = False,
        te: bool = False,
    ) -> None:
        self._answer_s, self._sizes = answer_s, tuple(sizes or range(1, size + 1))
        self._kind = "te" if te else "adapted" if adapted else "interpreted" if interpreted else "rank"
        self._open(size)

    def _open(self, size: int) -> None:
        self._start_s = _START_S
        context = mp.get_context("forkserver")
        # This process keeps the store: a port that is only chosen here may be taken before rank 0 listens on it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(rank, size, self._store.port, theirs, self._sizes), daemon=True
            )
            with server(self._kind):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Call `function(group, *args, **kwargs)` on ranks 0 to num_ranks-1; return the results by rank.

        Raises:
            AssertionError: the function failed on a rank; the text has all tracebacks.
        """
        name = (function.__module__, function.__qualname__)
        for pipe in self._pipes[:num_ranks]:
            pipe.send((num_ranks, name, args, kwargs))
        answers = []
        timeout_s, self._start_s = self._answer_s + self._start_s, 0
        for pipe in self._pipes[:num_ranks]:
            answers.append(pipe.recv() if pipe.poll(timeout_s) else (f"no answer within {timeout_s} s", None))
            if answers[-1][0]:
                timeout_s = min(timeout_s, 5.0)  # other ranks may wait for the failed rank
        failures = [f"rank {rank}:\n{text}" for rank, (text, _) in enumerate(answers) if text]
        if failures:
            # The other ranks may be inside a collective: the next test gets new workers.
            self.close()
            self._open(len(self._pipes))
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def server(kind: str) -> Iterator[None]:
    """Processes that start inside are forks of the server of this kind; multiprocessing itself has one server."""
    connect = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = SERVERS.get(kind).connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = connect


def _share_gloo_device() -> None:
    """All gloo groups of this process use one device. Its thread polls 100 times a second; Megatron has 30 groups."""
    device, group_class = dist.ProcessGroupGloo.create_default_device(), dist.ProcessGroupGloo

    class SharedDevice(group_class):  # type: ignore[misc,valid-type]
        def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, **_: object) -> None:
            options = group_class._Options()
            options._devices, options._timeout, options._threads = [device], timeout, 2
            super().__init__(store, rank, size, options)

    dist.distributed_c10d.ProcessGroupGloo = SharedDevice


def _work(rank: int, size: int, port: int, pipe: Connection, sizes: Sequence[int]) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    gc.freeze()  # A full collection would visit all objects of the imports, and copy their pages.
    _share_gloo_device()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    groups = {n: dist.new_group(list(range(n))) for n in sizes if n <= size}
    while True:
        try:
            num_ranks, (module, name), args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            pipe.send(("", function(groups[num_ranks], *args, **kwargs)))  # type: ignore[operator]
        except BaseException:
            pipe.send((traceback.format_exc(), None))


def assert_same(values: Sequence[Any]) -> None:
    """All ranks returned the same."""
    assert all(value == values[0] for value in values), values
