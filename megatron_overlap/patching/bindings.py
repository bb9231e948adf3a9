"""Who holds an object by value: module and class attributes, found by identity in `sys.modules`."""

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
        """The module in which the attribute is."""
        return str(self.holder.__name__ if isinstance(self.holder, ModuleType) else self.holder.__module__)

    def __str__(self) -> str:
        if isinstance(self.holder, ModuleType):
            return f"{self.module}:{self.name}"
        return f"{self.module}:{self.holder.__qualname__}.{self.name}"

    def read(self) -> Any:
        """What the attribute holds itself, past descriptors and inheritance; None where it is not its own."""
        return _namespace(self.holder).get(self.name)


def find_loaded(target: Target) -> Binding | None:
    """The place a target names, if its module is imported and all but its last part exist."""
    holder: Any = sys.modules.get(target.module)
    *outer, name = target.qualname.split(".")
    for part in outer:
        holder = None if holder is None else _namespace(holder).get(part)
    return None if holder is None else Binding(holder, name)


def bindings_of(*things: object) -> list[list[Binding]]:
    """For each of `things`, every attribute of an imported module, or of a class defined in one, that holds exactly it.

    Lists, dictionaries, closures and default arguments are not searched.
    """
    found: dict[int, list[Binding]] = {id(thing): [] for thing in things}
    for holder in _holders():
        for name, value in list(_namespace(holder).items()):
            if id(value) in found:
                found[id(value)].append(Binding(holder, name))
    return [found[id(thing)] for thing in things]


def _holders() -> Iterator[Any]:
    seen: set[int] = set()
    for module in list(sys.modules.values()):
        # Anything may stand in sys.modules; only real modules are looked into, and never by getattr, which
        # lazy modules answer with an import.
        if not _is_a(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        yield module
        for value in list(_namespace(module).values()):
            if _is_a(value, type) and id(value) not in seen:
                seen.add(id(value))
                yield value


def _namespace(holder: Any) -> Mapping[str, Any]:
    # Not vars() nor getattr: a lazy module answers those with an import.
    base = type if _is_a(holder, type) else object
    namespace: Mapping[str, Any] = base.__getattribute__(holder, "__dict__")
    return namespace


def _is_a(thing: object, kind: type) -> bool:
    # Not isinstance(): it asks `thing.__class__`, which proxies (torch.distributed.reduce_op is one) answer with
    # somebody else's class, or with a warning.
    return issubclass(type(thing), kind)
