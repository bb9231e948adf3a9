"""Python programs that start as forks of a process with the imports of a rank, which takes a tenth of the time."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tests.helpers.world import server


class ForkedProgram:
    """`python PROGRAM ARGV` in a process of its own, with its own environment.

    Args:
        program: a script, or "-m" and a module.
        argv: its arguments.
        environment: all of its environment; OMP_NUM_THREADS has its number of threads.
        output: file for its standard output and standard error.
    """

    def __init__(
        self, program: Sequence[str], argv: Sequence[str], environment: Mapping[str, str], output: Path
    ) -> None:
        self._output = output
        self._words = [*program, *argv]
        args = (list(program), list(argv), dict(environment), os.getcwd(), str(output))
        self._process = mp.get_context("forkserver").Process(target=run, args=args)
        with server("rank"):
            self._process.start()

    def wait(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """The result of the program.

        Raises:
            subprocess.TimeoutExpired: it has not ended in time.
        """
        self._process.join(timeout_s)
        text = self._output.read_text()
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout_s, text)
        return subprocess.CompletedProcess(self._words, self._process.exitcode, text)

    def kill(self) -> None:
        """Ends the program if it runs."""
        self._process.kill()
        self._process.join()


def run(
    program: list[str], argv: list[str], environment: dict[str, str], folder: str, output: str, errors: str = ""
) -> None:
    """Does what `python` does with these words, in a fork.

    Args:
        program: "-m" and a module, "-c" and code, or a script.
        argv: its arguments.
        environment: all of its environment.
        folder: its working directory.
        output: file for standard output.
        errors: file for standard error; empty: as standard output.
    """
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    mp.set_start_method(None, force=True)  # The server sets its own method in its forks.
    written = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(written, 1)
    os.dup2(os.open(errors, os.O_WRONLY) if errors else written, 2)
    gc.freeze()  # A full collection would visit all objects of the imports, and copy their pages.
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    sys.argv = [program[-1], *argv]
    if program[0] == "-m":
        sys.path.insert(0, folder)
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    elif program[0] == "-c":
        sys.argv[0] = "-c"
        exec(compile(program[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path.insert(0, os.path.dirname(program[0]))
        runpy.run_path(program[0], run_name="__main__")
