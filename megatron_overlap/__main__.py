"""Runs an unmodified Megatron training script with the plugin on.

python -m megatron_overlap SCRIPT ARGS... [--overlap-config FILE] [--overlap-run-dir DIR [--overlap-trace]]
"""

import atexit
import contextlib
import multiprocessing
import os
import sys
import threading
from typing import NoReturn

from megatron_overlap.adapters.training.bootstrap import USAGE, ScriptRun
from megatron_overlap.config import ConfigError
from megatron_overlap.config.errors import escape_output
from megatron_overlap.patching import PatchError


def main() -> NoReturn:
    """Runs the script and ends the process. Exit codes: 0 done, 1 the script failed, 2 the request was wrong."""
    argv = sys.argv[1:]
    escape_output()
    if argv[:1] in (["-h"], ["--help"]):
        print(f"{USAGE}\n\nRun a Megatron training script with the overlap. SCRIPT --help lists all options.")
        _leave(0)
    try:
        run = ScriptRun(argv)
        run.prepare()
    except (ConfigError, PatchError) as error:
        print(error, file=sys.stderr)
        _leave(2)
    try:
        run.execute()
        code = 0
    except SystemExit as request:
        code = request.code if isinstance(request.code, int) else int(request.code is not None)
        if not isinstance(request.code, int | None):
            print(request.code, file=sys.stderr)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = 1
        with contextlib.suppress(OSError):
            code = run.exit_code_of(error)
    _leave(run.finish(code))


def _leave(code: int) -> NoReturn:
    """Ends the process at once.

    A failed rank runs no exit handlers: they and communication threads may wait for peers that wait for this rank.
    Its sockets close with the process, which ends the peers. Its child processes, such as Megatron's checkpoint
    writers, are killed here: without an exit handler they would live on. The process ends in this way also where its
    log cannot be written, as on a full disk.

    A rank that succeeded joins its threads and runs the exit handlers, as the interpreter does. Without CUDA the
    interpreter is not finalized: Megatron's gloo groups are never destroyed, and a thread of gloo that releases a
    tensor during the finalization aborts the process. With CUDA the exit handlers of C libraries, such as profilers,
    also run.
    """
    if code == 0:
        if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
            sys.exit(0)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    if code != 0:
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(code)


if __name__ == "__main__":
    main()
