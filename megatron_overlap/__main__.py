"""``python -m megatron_overlap SCRIPT ARGS... [--overlap-config FILE] [--overlap-run-dir DIR]``.

Runs an unmodified Megatron training script with the plugin on: the script sees the command line it would see
without it, plus the plugin's own flags, which Megatron's parser then knows.
"""

import argparse
import multiprocessing
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

USAGE = (
    "usage: python -m megatron_overlap SCRIPT ARGS... [--overlap-config FILE] [--overlap-run-dir DIR [--overlap-trace]]"
)


class UsageError(ValueError):
    """The command line is wrong; the text is the one line to print."""


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the script and ends the process: 0 done, 1 the script failed, 2 the request was wrong."""
    from megatron_overlap.config import ConfigError
    from megatron_overlap.patching.errors import PatchError

    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] in (["-h"], ["--help"]):
        print(USAGE)
        _leave(0)
    try:
        run = _Run(argv)
        run.prepare()
    except (UsageError, ConfigError, PatchError) as error:
        print(error, file=sys.stderr)
        _leave(2)
    try:
        run.execute()
        code = 0
    except SystemExit as request:
        code = _exit_code(request)
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:
        code = run.failed(error)
    _leave(run.finish(code))


class _Run:
    """One script under the plugin."""

    def __init__(self, argv: list[str]) -> None:
        if not argv or argv[0].startswith("-"):
            raise UsageError(f"the first argument must be the training script; {USAGE}")
        self._script = Path(argv[0])
        if not self._script.is_file():
            raise UsageError(f"{argv[0]}: no such script: give the path of a training script, e.g. pretrain_gpt.py")
        self._argv = argv
        self._rank = int(os.environ.get("RANK", "0"))
        own, _ = _own_parser().parse_known_args(argv[1:])
        self._read_config(own)
        self._refuse_two_overlaps(argv)
        self._run_dir = _folder(own.overlap_run_dir) if own.overlap_run_dir else None
        self._trace = own.overlap_trace or self._overlap.trace
        if self._trace and self._run_dir is None:
            raise UsageError("command line: --overlap-trace: needs --overlap-run-dir, the folder to write events to")
        self._tracer: Any = None
        self._session: Any = None
        self._recorder: Any = None

    def _read_config(self, own: argparse.Namespace) -> None:
        from megatron_overlap.config import OverlapConfig, load_overlap_file

        self._overlap, launch = OverlapConfig(), None
        if own.overlap_config is not None:
            file = load_overlap_file(own.overlap_config)
            self._overlap, launch = file.overlap, file.launch
        self._device = own.overlap_device or (launch.device if launch is not None else "cuda")
        hosts = launch.hosts if launch is not None else None
        self._link = hosts.model_dump(mode="json") if hosts is not None else None

    def _refuse_two_overlaps(self, argv: list[str]) -> None:
        from megatron_overlap.config.megatron_args import TE_OVERLAP, TE_OVERLAP_ADVICE

        if TE_OVERLAP in argv and self._overlap.tensor.method != "none":
            raise UsageError(f"command line: {TE_OVERLAP}: {TE_OVERLAP_ADVICE}")

    def prepare(self) -> None:
        """Adapts what must be adapted and switches the plugin on, before the script imports Megatron.

        Raises:
            UsageError: Megatron is not installed.
            ConfigError: the plugin's off switch has a value that means nothing.
            PatchError: the config is strict and a patch is refused.
        """
        # What the interpreter does for `python SCRIPT`: a checkout's own modules are found beside the script,
        # before an installed megatron.
        sys.path[0] = str(self._script.resolve().parent)
        sys.argv = list(self._argv)
        if self._device == "cpu":
            from megatron_overlap.adapters import cpu

            cpu.install()
        # After the CPU adapter, which must be there before the first import of Megatron.
        from megatron_overlap.adapters.training import bootstrap

        missing = bootstrap.missing_module()
        if missing is not None:
            raise UsageError(
                f"{missing}: not installed: install megatron-core 0.17 or later, or run the script of a "
                "Megatron-LM checkout"
            )
        from megatron_overlap.adapters.training import arguments

        bootstrap.use_compiled_helpers()
        arguments.register()
        self._record()
        import megatron_overlap

        self._session = megatron_overlap.enable(self._overlap)
        if self._run_dir is not None:
            self._session.folder = self._run_dir
        if self._tracer is not None:
            self._session.trace = self._tracer.trace
        if self._rank == 0:
            self._show()

    def execute(self) -> None:
        """Runs the script as ``__main__``."""
        runpy.run_path(str(self._script), run_name="__main__")

    def failed(self, error: BaseException) -> int:
        """Tells what ended the script; the exit code for it."""
        from megatron_overlap.adapters.diagnostics.consistency import (
            ConfigMismatchError,
            ConsistencyCheck,
            UnsupportedConfigError,
        )

        if isinstance(error, ConfigMismatchError | UnsupportedConfigError):
            print(error, file=sys.stderr)
            return 2
        traceback.print_exception(error)
        check = None if self._session is None else self._session.find(ConsistencyCheck)
        written = None if check is None else check.post_mortem(error)
        if written is not None:
            print(f"rank {self._rank}: what it did last is in {written}", file=sys.stderr)
        return 1

    def _record(self) -> None:
        if self._run_dir is None:
            return
        from megatron_overlap.adapters.training.step_recorder import Recorder
        from megatron_overlap.adapters.training.step_tracer import StepTracer

        if self._trace:
            self._tracer = StepTracer(self._run_dir, self._rank, self._device)
        self._recorder = Recorder(self._run_dir, self._rank, self._device, self._link, self._tracer)
        self._recorder.install()

    def _show(self) -> None:
        print(self._session.report().render(), flush=True)

    def finish(self, code: int) -> int:
        """Reports, undoes, closes the process groups; returns the exit code to leave with."""
        try:
            if self._session is not None:
                if self._rank == 0:
                    self._show()
                if self._recorder is not None:
                    self._recorder.write_report(self._session.report().as_dict())
            if self._recorder is not None:
                if code == 0:
                    self._recorder.finish_trace()
                self._recorder.close()
            if code == 0:
                if self._session is not None:
                    self._session.disable()
                _destroy_process_groups()
        except Exception:
            traceback.print_exc()
            code = code or 1
        return code


def _own_parser() -> argparse.ArgumentParser:
    from megatron_overlap.adapters.training.arguments import add_overlap_arguments

    class OneLine(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise UsageError(f"command line: {message}")

    parser = OneLine(add_help=False, allow_abbrev=False)
    add_overlap_arguments(parser)
    return parser


def _folder(path: str) -> Path:
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UsageError(f"command line: --overlap-run-dir: {path}: {reason}: name a folder to write to") from error
    return Path(path)


def _destroy_process_groups() -> None:
    import torch

    # Without it a gloo worker thread outlives its objects and aborts the process at exit.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _exit_code(request: SystemExit) -> int:
    if request.code is None:
        return 0
    if isinstance(request.code, int):
        return request.code
    print(request.code, file=sys.stderr)
    return 1


def _leave(code: int) -> NoReturn:
    """Ends the process at once.

    A failed rank must not wait for peers that wait for it: exit handlers and communication threads do. Its sockets
    close with it, and that ends the peers. Processes that it started, such as Megatron's writers of checkpoints, would
    be ended by an exit handler, or live on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if code != 0:
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(code)
    sys.exit(0)


if __name__ == "__main__":
    main()
