"""Persistent worker processes: a test runs a function on all ranks of a group and gets the result of each."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

SIZES = (1, 2, 3, 4)
_START_S = 90
"""Time for the workers to start and import torch on a busy machine, added to the deadline of the first call."""


class World:
    """Four processes joined by gloo over loopback, with a group of the first n for every n.

    Args:
        size: processes.
        answer_s: deadline of one call in seconds.
        sizes: the sizes of groups.
        adapted: the workers are forks of a server process that has adapted and imported Megatron
            (`tests.helpers.adapted`).
        te: as `adapted`, with TransformerEngine (`tests.helpers.adapted_te`).
    """

    def __init__(
        self,
        size: int = max(SIZES),
        *,
        answer_s: float = 30,
        sizes: Sequence[int] = SIZES,
        adapted: bool = False,
        te: bool = False,
    ) -> None:
        self._answer_s, self._sizes, self._adapted, self._te = answer_s, tuple(sizes), adapted, te
        self._start_s = _START_S
        context: Any = mp.get_context("forkserver" if adapted or te else "spawn")
        if adapted:
            context.set_forkserver_preload(["tests.helpers.adapted"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(rank, size, port, theirs, self._sizes), daemon=True)
            with _te_server() if te else contextlib.nullcontext():
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
            self.__init__(  # type: ignore[misc]
                len(self._pipes), answer_s=self._answer_s, sizes=self._sizes, adapted=self._adapted, te=self._te
            )
            raise AssertionError("\n".join(failures))
        return [result for _, result in answers]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


_TE_SERVER = forkserver.ForkServer()
_TE_SERVER.set_forkserver_preload(["tests.helpers.adapted_te"])


@contextlib.contextmanager
def _te_server() -> Iterator[None]:
    """Processes that start inside are forks of a second server: the first one has imported Megatron without TE."""
    connect = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = _TE_SERVER.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = connect


def _work(rank: int, size: int, port: int, pipe: Connection, sizes: Sequence[int]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=60))
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
