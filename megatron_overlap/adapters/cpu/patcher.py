"""One replaced attribute, and how it is put in place and taken back."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_ABSENT = object()


@dataclass(frozen=True)
class Adaptation:
    """An attribute of torch or Megatron that this adapter replaces.

    Args:
        target: ``module:name`` or ``module:Class.name``.
        make: takes the original (``None`` where the attribute does not exist) and returns the replacement.
        why: one sentence; the table in ``docs/cpu.md`` and the code are read together.
        optional: the target may be missing in some releases; then nothing is done.
    """

    target: str
    make: Callable[[Any], Any]
    why: str
    optional: bool = False


class Applied:
    """What was replaced, in order, so that it can be undone exactly."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def apply(self, adaptations: Sequence[Adaptation]) -> None:
        """Replaces every target.

        Raises:
            AttributeError: a target that is not optional does not exist.
            ModuleNotFoundError: the module of a target that is not optional does not exist.
        """
        for adaptation in adaptations:
            try:
                owner, name = _resolve(adaptation.target)
                original = getattr(owner, name)
            except (ModuleNotFoundError, AttributeError):
                if not adaptation.optional:
                    raise
                continue
            # The raw entry, not the bound value: a staticmethod must come back as a staticmethod, and an
            # inherited attribute must be deleted again, not copied into the subclass.
            self._undo.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, adaptation.make(original))

    def revert(self) -> None:
        """Puts every original back, last replaced first."""
        while self._undo:
            owner, name, raw = self._undo.pop()
            if raw is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, raw)


def _resolve(target: str) -> tuple[Any, str]:
    module_name, _, path = target.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    return owner, name
