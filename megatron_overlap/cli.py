"""The `megatron-overlap` command. It imports the module of a subcommand only when that subcommand runs.

A subcommand is a function with typer annotations. It returns the exit code; None means 0.
"""

import importlib
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer

from megatron_overlap.config.errors import ConfigError, did_you_mean, usage_error
from megatron_overlap.version import __version__

# typer contains its own copy of click in some releases. Its BadParameter is a class of that copy in every release.
_click_errors = importlib.import_module(typer.BadParameter.__module__)

PROGRAM = "megatron-overlap"
COMMANDS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "launch": ("megatron_overlap.tools.launch.command:launch", "Start a training from a launch config."),
        "compare": ("megatron_overlap.tools.compare.command:compare", "Measure configs in alternating rounds."),
        "doctor": (
            "megatron_overlap.tools.doctor:command",
            "Report which features work on this machine.",
        ),
        "tune": (
            "megatron_overlap.tools.launch.command:tune",
            "Measure the fastest method of each layer before a run.",
        ),
        "trace": ("megatron_overlap.tools.trace:trace", "Show computation, waits and messages of each rank."),
        "simulate": (
            "megatron_overlap.tools.simulate.command:simulate",
            "Predict the time of a training step on a cluster.",
        ),
        "patches": ("megatron_overlap.patching.command:patches", "List what the plugin replaces in Megatron."),
        "plan": ("megatron_overlap.tools.plan:plan", "Show which rank gets which documents of a batch."),
        "schema": ("megatron_overlap.config.loading:schema", "Print the JSON Schema of launch configs."),
    }
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the name of the program; None: those of the process.

    Returns:
        0 done, 1 the run failed or a check did not hold, 2 the request was wrong (one line on stderr).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        name = _command_in(args)
        return _run(name, args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except (typer.Abort, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
        return 130


def _command_in(args: Sequence[str]) -> str | None:
    """The name of the subcommand; None for --help and --version."""
    if not args:
        raise usage_error("command", None, f"use one of {', '.join(COMMANDS)}; see --help")
    first = args[0]
    if first in ("--help", "--version"):
        return None
    if first.startswith("-"):
        raise usage_error("option", first, did_you_mean(first, ("--help", "--version"), "option"))
    if first not in COMMANDS:
        raise usage_error("command", first, did_you_mean(first, COMMANDS, "command"))
    return first


def _run(name: str | None, args: list[str]) -> int:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.callback(invoke_without_command=True)(_root)
    for known, (target, short) in COMMANDS.items():
        app.command(known, help=None if known == name else short)(_load(target) if known == name else _unloaded)
    try:
        result = app(args=args, prog_name=PROGRAM, standalone_mode=False)
    except _click_errors.ClickException as error:
        raise _explain(name, args, error) from error
    return result if isinstance(result, int) else 0


def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    """Overlap the communication of Megatron-LM with its computation."""
    if version:
        print(f"{PROGRAM} {__version__}")
        raise typer.Exit


def _unloaded() -> None:
    """Placeholder of a subcommand in the list of --help."""


def _load(target: str) -> Callable[..., Any]:
    module, _, attribute = target.partition(":")
    function = getattr(importlib.import_module(module), attribute)
    assert callable(function)
    return function  # type: ignore[no-any-return]


def _explain(name: str | None, args: Sequence[str], error: Exception) -> ConfigError:
    """The one-line error of a usage error of typer."""
    params = getattr(getattr(getattr(error, "ctx", None), "command", None), "params", [])
    options = [text for param in params for text in param.opts if text.startswith("-")]
    param = getattr(error, "param", None)
    option = getattr(error, "option_name", None)
    key = name or "option"
    more = f"see {PROGRAM} {key} --help"
    if isinstance(error, _click_errors.NoSuchOption):
        text = str(option)
        if "." in text:
            return usage_error(key, text, "unknown option; write an override as key=value, without dashes")
        return usage_error(key, text, did_you_mean(text, [*options, "--help"], "option"))
    if isinstance(error, _click_errors.MissingParameter) and param is not None:
        return usage_error(key, None, f"give {str(param.name).upper()}; {more}")
    message = str(getattr(error, "message", error)).rstrip(".")
    extra = re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)
    if extra is not None:
        return usage_error(key, extra[1], f"takes no such argument; {more}")
    where = param.opts[-1] if param is not None else option
    if where is None:
        return usage_error(key, " ".join(args), f"{message}; {more}")
    return usage_error(f"{key} {where}", _given(args, where), f"{message}; {more}")


def _given(args: Sequence[str], option: str) -> str | None:
    """The value of an option on the command line; None: the option has no value."""
    for index, arg in enumerate(args):
        if arg.startswith(f"{option}="):
            return arg.removeprefix(f"{option}=")
        if arg == option and index + 1 < len(args):
            return args[index + 1]
    return None


if __name__ == "__main__":
    sys.exit(main())
