"""Python packages, written to disk and imported, whose attributes the engine replaces."""

from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from megatron_overlap.patching.manifest import Manifest, ReviewedRelease, digest_of
from megatron_overlap.patching.source import ImportedTree, Target, definitions

NUMBERS = itertools.count()

VENDOR = '''
def scale(value, factor=2):
    """Documented."""
    # commented
    return value * factor


class Base:
    def inherited(self, value):
        return value + 1

    def plain(self, value, *args, **kwargs):
        return ("vendor", value, args, kwargs)

    @staticmethod
    def free(value):
        return ("vendor static", value)

    @classmethod
    def made(cls, value):
        return ("vendor class", cls.__name__, value)


class Derived(Base):
    pass
'''

FACTORIES = """
def outer(original, session):
    def replacement(*args, **kwargs):
        return ("ours", original(*args, **kwargs))
    return replacement


def fails(original, session):
    raise RuntimeError("no transport")


def lazy(original, session):
    return original
"""


class Packages:
    """Writes modules into a fresh importable folder, under a package name that no other test uses."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.vendor_name = f"vendor{next(NUMBERS)}"
        self.vendor = self.write(f"{self.vendor_name}.layers", VENDOR)
        self.factories = self.write(f"ours{next(NUMBERS)}", FACTORIES)

    def write(self, name: str, source: str) -> ModuleType:
        """Writes a module and imports it."""
        *parents, last = name.split(".")
        folder = self.folder.joinpath(*parents)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{last}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name)

    def manifest(
        self,
        qualname: str,
        factory: str = "outer",
        *,
        feature: str = "tensor",
        also_bound: tuple[str, ...] = (),
        relies_on: tuple[str, ...] = (),
        module: ModuleType | None = None,
    ) -> Manifest:
        """A manifest whose reviewed release is the current source."""
        target = Target((module or self.vendor).__name__, qualname)
        tree = ImportedTree()
        found = definitions(tree, target) or definitions(
            tree, Target(target.module, qualname.replace("Derived", "Base"))
        )
        return Manifest(
            target=str(target),
            replacement=f"{self.factories.__name__}:{factory}",
            feature=feature,
            why="a target for the tests of the engine",
            also_bound=list(also_bound),
            relies_on=list(relies_on),
            releases={
                "1.0.0": ReviewedRelease(
                    signature=found[0].signature,
                    digest=found[0].digest,
                    relies_on={name: digest_of(tree, name) for name in relies_on},
                )
            },
        )


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Packages]:
    """Importable packages, removed from sys.modules after the test."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield Packages(tmp_path)
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def snapshot() -> Callable[[object], Callable[[], bool]]:
    """Copies a namespace; the returned function tells whether it holds the same names and objects again."""

    def remember(holder: object) -> Callable[[], bool]:
        before = dict(vars(holder))

        def same() -> bool:
            now = dict(vars(holder))
            return now.keys() == before.keys() and all(now[name] is before[name] for name in before)

        return same

    return remember
