"""Choices kept on disk, so that the next run of the same kind starts with them. Pure.

A folder of JSON files, one for each environment: hardware, versions, topology. Files are private to their user,
written beside and renamed, and read as data; what cannot be read, or is of another environment, is ignored.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_overlap.autotune.candidates import Candidate

FORMAT = "megatron_overlap choices 1"

# Loopback under load differs by more than a half from run to run; what is still wrong is found by looking again.
_OTHER_LINK = 2.0


class ChoiceCacheWarning(UserWarning):
    """A cache could not be read or written; the run goes on without it."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One choice.

    Attributes:
        candidate: what was chosen.
        us: its time, and `stock_us` that of Megatron's own path, in microseconds.
        link_rate: bytes per microsecond of the group's messages when it was made: the topology as it was felt.
    """

    candidate: Candidate
    us: float
    stock_us: float
    link_rate: float

    def fits(self, link_rate: float) -> bool:
        """Whether a link of this rate is still the one the choice was made on."""
        return self.link_rate / _OTHER_LINK <= link_rate <= self.link_rate * _OTHER_LINK

    def as_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**self.candidate.as_dict(), "us": self.us, "stock_us": self.stock_us, "link_rate": self.link_rate}

    @classmethod
    def of(cls, tree: Any) -> Entry:
        """The entry that `as_dict` gave `tree` for.

        Raises:
            ValueError: it is none.
        """
        if not isinstance(tree, dict):
            raise ValueError(f"entry: {tree!r}: not an object")
        figures = [tree.get(key) for key in ("us", "stock_us", "link_rate")]
        if not all(isinstance(figure, int | float) and math.isfinite(figure) and figure > 0 for figure in figures):
            raise ValueError(f"entry: {tree}: its figures are not times and rates")
        return cls(Candidate.of(tree), *(float(figure) for figure in figures))  # type: ignore[arg-type]


class ChoiceCache:
    """The choices of one environment.

    Args:
        folder: where the files are; made when something is written.
        environment: what choices depend on besides the shape.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        text = json.dumps(self._environment, sort_keys=True)
        self.path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
        self._warned = False
        self._entries = self._read()

    def get(self, key: str) -> Entry | None:
        """The choice for `key`."""
        return self._entries.get(key)

    def put(self, key: str, entry: Entry) -> None:
        """Keeps a choice, beside those that other processes have kept meanwhile."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(self.path.with_suffix(".lock")):
                self._entries = {**self._read(), key: entry}
                self._write()
        except OSError as error:
            self._entries[key] = entry
            self._warn(f"cannot be written: {error.strerror or error}")

    def forget(self, key: str) -> None:
        """Leaves out a choice that no longer holds, until it is made anew."""
        self._entries.pop(key, None)

    def _read(self) -> dict[str, Entry]:
        try:
            tree = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            self._warn(f"cannot be read: {str(error).splitlines()[0]}")
            return {}
        if not isinstance(tree, dict) or tree.get("format") != FORMAT or tree.get("environment") != self._environment:
            self._warn("is not of this release, hardware or topology")
            return {}
        entries, wrong = {}, []
        choices = tree.get("choices")
        for key, value in choices.items() if isinstance(choices, dict) else ():
            try:
                entries[key] = Entry.of(value)
            except ValueError:
                wrong.append(key)
        if wrong or not isinstance(choices, dict):
            self._warn(f"{len(wrong)} of its entries mean nothing" if wrong else "has no choices")
        return entries

    def _write(self) -> None:
        choices = {key: entry.as_dict() for key, entry in sorted(self._entries.items())}
        tree = {"format": FORMAT, "environment": self._environment, "choices": choices}
        # mkstemp's files are readable by their owner alone; renamed, so that no reader sees a part of one.
        number, name = tempfile.mkstemp(dir=self.path.parent, prefix=self.path.stem)
        try:
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(tree, file, indent=1)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _warn(self, what: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{self.path}: {what}; choices are measured anew", ChoiceCacheWarning, stacklevel=4)


def kept(folder: Path) -> Iterator[tuple[dict[str, str], str, Entry]]:
    """All choices in `folder`, with the environment they are for; what cannot be read is passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree.get("format") != FORMAT:
                continue
            for key, value in tree["choices"].items():
                yield tree["environment"], key, Entry.of(value)
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            continue


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    number = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)
