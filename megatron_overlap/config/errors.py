"""`ConfigError`, the one-line error of a wrong configuration, and `Problem`, a finding of a check."""

import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from pydantic_core import PydanticCustomError

MAX_VALUE_CHARS = 80
_COMMAND_LINE = "command line"


class ConfigError(ValueError):
    """A config file or a command line is wrong.

    `str()` is one line: `file: key: value: remedy`, with a dotted key, a shortened value, and what to write instead.
    """

    def __init__(self, file: str, key: str, value: object, remedy: str) -> None:
        self.file, self.key, self.value, self.remedy = file, key, value, remedy
        shown = "missing" if value is None and file == _COMMAND_LINE else show_value(value)
        super().__init__(f"{_line(file)}: {_line(key)}: {shown}: {_line(remedy)}")


def usage_error(key: str, value: object, remedy: str) -> ConfigError:
    """The error of a command line; `key` names the command and the option."""
    return ConfigError(_COMMAND_LINE, key, value, remedy)


def _line(text: str) -> str:
    return " ".join(text.split())


def show_value(value: object) -> str:
    """A value in YAML syntax on one line of at most 80 characters."""
    if value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = _line(str(value)) or repr(value)
    if len(text) > MAX_VALUE_CHARS:
        # Keep both ends: the root and the name of a path.
        head = (MAX_VALUE_CHARS - 3) // 2
        text = f"{text[:head]}...{text[head + 3 - MAX_VALUE_CHARS :]}"
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most similar to `name`; None: no name is similar."""
    return next(iter(get_close_matches(name, list(known), n=1)), None)


def did_you_mean(name: str, known: Iterable[str], what: str = "key") -> str:
    """The remedy of an unknown name: the most similar name, or all names."""
    names = list(known)
    match = nearest(name, names)
    return f"unknown {what}; " + (f"did you mean {match}?" if match else f"use one of {', '.join(names)}")


def escape_output() -> None:
    """Let the standard output escape characters that it cannot encode, as in a log without UTF-8."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        with suppress(OSError):  # a pipe that replaced a file
            sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turns the OSError of writing a file that a command line option names into a `ConfigError`."""
    try:
        yield
    except OSError as error:
        remedy = f"{error.strerror or 'cannot be written'}; give a path that can be written"
        raise usage_error(option, str(path), remedy) from error


@dataclass(frozen=True)
class Problem:
    """A value that cannot be used, its key below the section that was checked, and what to write instead."""

    key: str
    value: object
    remedy: str


def raise_first(problems: Iterable[Problem]) -> None:
    """Raise the first problem, if any, as a validation error that `section.validate` turns into a ConfigError."""
    for problem in problems:
        raise PydanticCustomError("problem", "{key}: {value}: {remedy}", dict(vars(problem)))
