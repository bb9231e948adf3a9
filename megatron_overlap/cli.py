"""The `megatron-overlap` command. It imports the module of a subcommand only when that subcommand runs.

A subcommand is a function with typer annotations. It returns the exit code; None means 0.
"""

import importlib
import pkgutil
import re
import sys
from collections.abc import Mapping, Sequence

import typer

from megatron_overlap.config.errors import ConfigError, did_you_mean, escape_output, usage_error
from megatron_overlap.version import __version__

# typer contains its own copy of click in some releases. Its BadParameter is a class of that copy in every release.
_click_errors = importlib.import_module(typer.BadParameter.__module__)

PROGRAM = "megatron-overlap"
COMMANDS: Mapping[str, tuple[str, str]] = {
    "launch": ("tools.launch.command:launch", "Start a training from a launch config."),
    "compare": ("tools.compare.command:compare", "Measure configs in alternating rounds."),
    "doctor": ("tools.doctor:command", "Report which features work on this machine."),
    "tune": ("tools.launch.command:tune", "Measure the fastest method of each layer before a run."),
    "trace": ("tools.trace:trace", "Show computation, waits and messages of each rank."),
    "simulate": ("tools.simulate.command:simulate", "Predict the time of a training step on a cluster."),
    "patches": ("patching.command:patches", "List what the plugin replaces in Megatron."),
    "plan": ("tools.plan:plan", "Show which rank gets which documents of a batch."),
    "schema": ("config.loading:schema", "Print the JSON Schema of launch configs."),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with arguments without the name of the program. None: the arguments of the process.

    Returns 0: done, 1: the run failed or a check did not hold, 2: the request was wrong (one line on stderr).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    escape_output()
    try:
        return _run(_command_in(args), args)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is not None:
            raise
        print(f"{PROGRAM}: cannot write the output: {error.strerror}", file=sys.stderr)
        return 1
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
        if known == name:
            app.command(known)(pkgutil.resolve_name(f"megatron_overlap.{target}"))
        else:  # for the list of --help
            app.command(known, help=short)(lambda: None)
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


def _explain(name: str | None, args: Sequence[str], error: Exception) -> ConfigError:
    """The one-line error of a usage error of typer."""
    param, option = getattr(error, "param", None), getattr(error, "option_name", None)
    key = name or "option"
    more = f"see {PROGRAM} {key} --help"
    if isinstance(error, _click_errors.NoSuchOption):
        text, remedy = str(option), "unknown option; write an override as key=value, without dashes"
        if "." not in text:
            options = [text for param in error.ctx.command.params for text in param.opts if text.startswith("-")]
            remedy = did_you_mean(text, [*options, "--help"], "option")
        return usage_error(key, text, remedy)
    if isinstance(error, _click_errors.MissingParameter) and param is not None:
        return usage_error(key, None, f"give {str(param.name).upper()}; {more}")
    message = str(getattr(error, "message", error)).rstrip(".")
    if (extra := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message)) is not None:
        return usage_error(key, extra[1], f"takes no such argument; {more}")
    where = param.opts[-1] if param is not None else option
    if where is None:
        return usage_error(key, " ".join(args), f"{message}; {more}")
    return usage_error(f"{key} {where}", _given(args, where), f"{message}; {more}")


def _given(args: Sequence[str], option: str) -> str | None:
    """The value of an option on the command line; None: the option has no value."""
    for arg, following in zip(args, [*args[1:], None], strict=True):
        if arg.startswith(f"{option}="):
            return arg.removeprefix(f"{option}=")
        if arg == option:
            return following
    return None


if __name__ == "__main__":
    sys.exit(main())
