"""Attributes of modules and classes that hold an object by value, found by identity in `sys.modules`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megatron_overlap.patching.source import Target


@dataclass(frozen=True)
class Binding:
    """An attribute `name` of a module or class."""

    holder: Any
    name: str

    @property
    def module(self) -> str:
        """Name of the module that has the attribute."""
        return str(self.holder.__name__ if isinstance(self.holder, ModuleType) else self.holder.__module__)

    def __str__(self) -> str:
        if isinstance(self.holder, ModuleType):
            return f"{self.module}:{self.name}"
        return f"{self.module}:{self.holder.__qualname__}.{self.name}"

    def read(self) -> Any:
        """The raw value in the holder's own namespace, without descriptors; None where it is inherited or missing."""
        return _namespace(self.holder).get(self.name)


def find_loaded(target: Target) -> Binding | None:
    """The attribute that a target names, if its module is imported and all but the last name exist."""
    holder: Any = sys.modules.get(target.module)
    *outer, name = target.qualname.split(".")
    for part in outer:
        holder = None if holder is None else _namespace(holder).get(part)
    return None if holder is None else Binding(holder, name)


def bindings_of(*objects: object) -> list[list[Binding]]:
    """For each object, every attribute of an imported module, or of a class in one, that holds this object.

    Lists, dictionaries, closures and default arguments are not searched.
    """
    found: dict[int, list[Binding]] = {id(each): [] for each in objects}
    for holder in _holders():
        for name, value in list(_namespace(holder).items()):
            if id(value) in found:
                found[id(value)].append(Binding(holder, name))
    return [found[id(each)] for each in objects]


def _holders() -> Iterator[Any]:
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # sys.modules may hold any object. Only real modules are searched, and never with getattr: a lazy module would
        # import something.
        if not _is_a(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        for value in list(_namespace(module).values()):
            if _is_a(value, type) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _namespace(holder: Any) -> Mapping[str, Any]:
    # Not vars() or getattr(): a lazy module would import something.
    base = type if _is_a(holder, type) else object
    namespace: Mapping[str, Any] = base.__getattribute__(holder, "__dict__")
    return namespace


def _is_a(value: object, kind: type) -> bool:
    # Not isinstance(): it reads `value.__class__`, for which a proxy such as torch.distributed.reduce_op returns the
    # class of another object, or warns.
    return issubclass(type(value), kind)
