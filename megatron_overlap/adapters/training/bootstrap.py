"""Runs an unmodified Megatron training script with the plugin, for `python -m megatron_overlap`."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_overlap.config import ConfigError, OverlapConfig, load_overlap_file
from megatron_overlap.config.errors import usage_error, writing
from megatron_overlap.config.launch import LaunchSection
from megatron_overlap.config.megatron_args import TE_OVERLAP, TE_OVERLAP_ADVICE
from megatron_overlap.config.resources import transformer_engine_available
from megatron_overlap.patching import RevertRefusedError
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import load_manifests
from megatron_overlap.session import Session, current, enable, is_switched_off
from megatron_overlap.tracing import Trace

if TYPE_CHECKING:
    # These import torch and Megatron, which must be adapted to the CPU first.
    from megatron_overlap.adapters.training.train_step import StepRecorder
    from megatron_overlap.adapters.wrapping import Method

USAGE = (
    "usage: python -m megatron_overlap SCRIPT ARGS... [--overlap-config FILE] [--overlap-run-dir DIR [--overlap-trace]]"
)
_HELPERS = "dataset_helpers"
_OF_A_SCRIPT = frozenset({"launch", _HELPERS})
"""The features of the patches that every script needs."""


class ScriptRun:
    """One run of a training script, given with its arguments, under the plugin: `prepare`, `execute`, then `finish`.

    Raises ConfigError if the command line or the config file is wrong.
    """

    def __init__(self, argv: list[str]) -> None:
        if not argv or argv[0].startswith("-"):
            first = argv[0] if argv else None
            raise usage_error("SCRIPT", first, f"the first argument must be the training script; {USAGE}")
        self._script = Path(argv[0])
        if not self._script.is_file():
            raise usage_error("SCRIPT", argv[0], "no such script; give the path of one, e.g. pretrain_gpt.py")
        self._argv = argv
        self._rank = int(os.environ.get("RANK", "0"))
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
        parser.add_argument("--transformer-impl")
        try:
            flags, _ = add_overlap_arguments(parser).parse_known_args(argv[1:])
        except argparse.ArgumentError as error:
            what, _, detail = error.message.partition(": ")  # such as "invalid choice: 'tpu' (choose from ...)"
            raise usage_error(error.argument_name or "options", what if detail else None, detail or what) from error
        self._overlap, self._launch = OverlapConfig(), LaunchSection()
        if flags.overlap_config is not None:
            self._overlap, self._launch = load_overlap_file(flags.overlap_config)
        self._device = flags.overlap_device or self._launch.device
        self._te_layers = flags.transformer_impl == "transformer_engine"
        if TE_OVERLAP in argv and self._overlap.tensor.method != "none" and not is_switched_off():
            raise usage_error(TE_OVERLAP, True, TE_OVERLAP_ADVICE)
        self._run_dir = Path(flags.overlap_run_dir) if flags.overlap_run_dir else None
        if self._run_dir is not None:
            with writing("--overlap-run-dir", self._run_dir):
                self._run_dir.mkdir(parents=True, exist_ok=True)
        self._trace = flags.overlap_trace or self._overlap.trace
        if self._trace and self._run_dir is None:
            raise usage_error("--overlap-trace", True, "needs --overlap-run-dir, the folder to write events to")
        self._recorder: StepRecorder | None = None

    def prepare(self) -> None:
        """Applies all patches, before the script imports Megatron.

        Raises ConfigError if a package is missing, and PatchError if a patch is refused that the run needs.
        """
        # As `python SCRIPT` does: modules of a checkout are found beside the script, before an installed megatron.
        sys.path[0] = str(self._script.resolve().parent)
        sys.argv = list(self._argv)
        if self._device == "cpu":
            from megatron_overlap.adapters import cpu

            cpu.install(te_layers=self._te_layers, rehearsal=self._launch.rehearsal)
        try:
            import megatron.training  # noqa: F401
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "megatron":
                raise
            remedy = "install megatron-core 0.17 or later, or run the script of a Megatron-LM checkout"
            raise ConfigError("environment", error.name, "not installed", remedy) from error
        self._session = enable(self._overlap)
        if self._run_dir is None:
            self._session.apply_patches(_OF_A_SCRIPT, required=True)
        else:
            self._record(self._session, self._run_dir)
        if self._rank == 0:
            print(self._session.report().render(at_start=True), flush=True)

    def _record(self, session: Session, run_dir: Path) -> None:
        from megatron_overlap.adapters.training.train_step import StepRecorder

        session.folder = run_dir
        features = {*_OF_A_SCRIPT, "training"}
        if self._trace:
            session.trace = Trace()
            # On CUDA a wait orders streams and takes the host no time.
            features |= {"tracing", "tracing_cpu"} if self._device == "cpu" else {"tracing"}
        hosts = self._launch.hosts
        link = None if hosts is None else hosts.model_dump(mode="json")
        self._recorder = session.adapter(
            StepRecorder, lambda session: StepRecorder(session, run_dir, self._rank, self._device, link)
        )
        # In one call: each one searches the process for attributes that hold a target.
        session.apply_patches(features, required=True)
        session.apply_patches({"evaluation"})

    def execute(self) -> None:
        """Runs the script as `__main__`."""
        runpy.run_path(str(self._script), run_name="__main__")

    def exit_code_of(self, error: BaseException) -> int:
        """Prints the error that ended the script, writes the flight recorder's file, and returns the exit code."""
        from megatron_overlap.adapters.diagnostics.consistency import ConfigMismatchError, ConsistencyCheck

        if isinstance(error, ConfigError | ConfigMismatchError):
            print(error, file=sys.stderr)
            return 2
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        check = self._session.find(ConsistencyCheck)
        if check is not None and (written := check.post_mortem(error)) is not None:
            print(f"rank {self._rank}: its last operations are in {written}", file=sys.stderr)
        return 1

    def finish(self, code: int) -> int:
        """Reports, reverts all patches, closes the process groups; returns the exit code of the process.

        After a failure the report is only written to the run folder, so that the output ends with the cause.
        """
        try:
            if self._rank == 0 and code == 0:
                print(self._session.report().render(), flush=True)
            if self._recorder is not None:
                self._recorder.finish(self._session.report().as_dict(), succeeded=code == 0)
            if code == 0:
                try:
                    self._session.disable()
                except RevertRefusedError:  # the script replaced a function of Megatron, too, and the process ends
                    self._session.clean_up()
                # Otherwise a gloo worker thread outlives its objects and aborts the process at exit.
                import torch

                if torch.distributed.is_initialized():
                    torch.distributed.destroy_process_group()
        except Exception:
            with contextlib.suppress(OSError):
                traceback.print_exc()
            code = code or 1
        return code


def validate_arguments() -> None:
    """Validates Megatron's arguments of a launch on WORLD_SIZE GPUs. Unknown arguments belong to a custom script."""
    from megatron_overlap.adapters import cpu

    has_te = transformer_engine_available()
    cpu.install(te_layers=has_te, rehearsal=True)
    from megatron.training import arguments

    args = arguments.parse_args(ignore_unknown_args=True)
    arguments.validate_args(args, {})
    if has_te:  # The default of some fused kernels needs TransformerEngine, for local layers too.
        arguments.core_transformer_config_from_args(args)


def add_overlap_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's flags to `parser` and returns it."""
    group = parser.add_argument_group("megatron_overlap")
    group.add_argument("--overlap-config", metavar="FILE", help="overlap config or launch config (YAML)")
    group.add_argument("--overlap-run-dir", metavar="DIR", help="folder of the steps, versions and report of each rank")
    what = "record computation, waits and messages of each rank for megatron-overlap trace"
    group.add_argument("--overlap-trace", action="store_true", help=what)
    what = "device to train on; default: launch.device of the config, else cuda"
    group.add_argument("--overlap-device", choices=("cpu", "cuda"), help=what)
    return parser


def add_megatron_arguments(original: Method, session: Session) -> Method:
    """Factory of a patch: Megatron's parser accepts the plugin's flags, whatever script runs."""
    return lambda parser, *args, **kwargs: add_overlap_arguments(original(parser, *args, **kwargs))


def compile_helpers(original: Method, session: Session | None) -> Method:
    """Factory of a patch: does not run `make` where the dataset helpers are compiled and have no Makefile."""

    def run(*args: Any, **kwargs: Any) -> Any:
        from megatron.core.datasets import utils

        compiled = importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None
        if compiled and not Path(utils.__file__).with_name("Makefile").exists():
            return None
        return original(*args, **kwargs)

    return run


def use_compiled_helpers() -> None:
    """Applies the patch of `compile_helpers`, for the provided scripts, which also run without the plugin."""
    session = current()
    if session is not None:
        session.apply_patches({_HELPERS}, required=True)
    else:
        engine = Engine(load_manifests())
        engine.apply(engine.plan({_HELPERS}), None)
