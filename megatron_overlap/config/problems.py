"""What a check finds, and how it becomes the error of a config file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Problem:
    """A value that cannot be used.

    Attributes:
        key: dotted path below the section that was checked.
        value: what stands there.
        remedy: what to write instead.
    """

    key: str
    value: object
    remedy: str


def raise_first(problems: Iterator[Problem]) -> None:
    """Raise the first problem as a validation error that `loading` turns into a ConfigError.

    Raises:
        PydanticCustomError: there is a problem.
    """
    for problem in problems:
        context = {"key": problem.key, "value": problem.value, "remedy": problem.remedy}
        raise PydanticCustomError("problem", "{key}: {value}: {remedy}", context)
