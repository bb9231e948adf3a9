"""Finds a function or class in source text and describes it by its signature and a digest of its body.

The digest covers every token except comments, docstrings, blank lines and the depth of indentation. Two releases have
the same source at a place when the digests are equal.
"""

import ast
import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import sys
import tokenize
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

PACKAGE = "megatron"  # its source is judged

_Definable = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Target:
    """A name inside a module, written `module:attr` or `module:Class.attr`."""

    module: str
    qualname: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Splits `module:qualname`.

        Raises ValueError if there is not exactly one colon, or a part is not a dotted name.
        """
        module, colon, qualname = text.partition(":")
        parts = [*module.split("."), *qualname.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            raise ValueError(f"{text!r} is not of the form module:attr or module:Class.attr")
        return cls(module, qualname)

    def __str__(self) -> str:
        return f"{self.module}:{self.qualname}"


@dataclass(frozen=True)
class Definition:
    """One `def` or `class` statement of a source file.

    `line` counts from 1. It is the line of the first decorator, if any, like `__code__.co_firstlineno`.
    """

    file: str
    line: int
    signature: str
    digest: str
    num_decorators: int


class DirectoryTree:
    """Sources under the given folders or wheels; the first that has a module wins, as on `sys.path`."""

    def __init__(self, *roots: Path) -> None:
        self.roots = [zipfile.Path(root) if root.is_file() else root for root in roots]

    def read(self, module: str) -> tuple[str, str] | None:
        """File name and text of a module; None where the module is missing."""
        for root in self.roots:
            for ending in (".py", "/__init__.py"):
                file = root / f"{module.replace('.', '/')}{ending}"
                if file.is_file():
                    return str(file), file.read_text(encoding="utf-8")
        return None


class ImportedTree:
    """Sources of the modules that this process imported. An instance reads each file once."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str]] = {}

    def read(self, module: str) -> tuple[str, str] | None:
        """File name and text of a module; None where the module is not imported or has no source."""
        if module not in self._found:
            loaded: Any = sys.modules.get(module)
            # Modules without a file or a loader lack the attributes, and so does a missing module.
            with contextlib.suppress(AttributeError, ImportError, OSError):
                file, text = loaded.__file__, loaded.__loader__.get_source(module)
                if file is not None and text is not None:
                    self._found[module] = file, text
        return self._found.get(module)


SourceTree = DirectoryTree | ImportedTree


def installed_tree() -> DirectoryTree | None:
    """The folders from which `import megatron` would read; None if it is not installed. Imports nothing."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return DirectoryTree(*(Path(location).parent for location in spec.submodule_search_locations))


def megatron_release(tree: SourceTree) -> str | None:
    """The megatron-core release in a tree, such as `0.19.2`, read from its source; None if the tree has none."""
    found = tree.read("megatron.core.package_info")
    if found is None:
        return None
    numbers: dict[str, object] = {}
    for node in _parse(found[1]).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            numbers.update({name.id: node.value.value for name in node.targets if isinstance(name, ast.Name)})
    if not {"MAJOR", "MINOR", "PATCH"} <= numbers.keys():
        return None
    return "{MAJOR}.{MINOR}.{PATCH}".format_map(numbers) + str(numbers.get("PRE_RELEASE") or "")


def definitions(tree: SourceTree, target: Target) -> list[Definition]:
    """Every statement that defines `target`: none where it is missing, several where an `if` chooses."""
    found = tree.read(target.module)
    return list(_definitions(*found, target.qualname)) if found is not None else []


# Many patches rely on the same definition.
@functools.lru_cache(maxsize=256)
def _definitions(file: str, text: str, qualname: str) -> tuple[Definition, ...]:
    return tuple(_describe(node, file, text) for node in _find(_parse(text).body, qualname.split(".")))


@functools.lru_cache(maxsize=16)
def _parse(text: str) -> ast.Module:
    return ast.parse(text)


def _find(body: Iterable[ast.stmt], names: Sequence[str]) -> Iterator[_Definable]:
    for node in body:
        if isinstance(node, _Definable):
            if node.name != names[0]:
                continue
            if len(names) == 1:
                yield node
            elif isinstance(node, ast.ClassDef):
                yield from _find(node.body, names[1:])
        else:
            for block in ("body", "orelse", "finalbody"):
                yield from _find(getattr(node, block, []), names)
            for handler in getattr(node, "handlers", []):
                yield from _find(handler.body, names)


def _describe(node: _Definable, file: str, text: str) -> Definition:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    if isinstance(node, ast.ClassDef):
        signature = ", ".join(map(ast.unparse, node.bases))
    else:
        # Annotations are left out: releases add and change them without an effect on calls.
        arguments = copy.deepcopy(node.args)
        for argument in ast.walk(arguments):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        signature = ast.unparse(arguments)
    normal = "\n".join(_normal_tokens(node, first, text))
    digest = hashlib.sha256(normal.encode()).hexdigest()
    return Definition(file, first, f"({signature})", digest, len(node.decorator_list))


def _normal_tokens(node: _Definable, first: int, text: str) -> Iterator[str]:
    docstring_rows = _docstring_rows(node)
    # Without the rest of the file, which takes several times as long.
    lines = list(io.StringIO(text))[first - 1 : node.end_lineno or first]
    f_strings: list[tuple[int, int]] = []
    for token in tokenize.generate_tokens(iter(lines).__next__):
        row, column = token.start
        if row > len(lines) or token.type in (tokenize.COMMENT, tokenize.NL):
            continue
        if first - 1 + row in docstring_rows and token.type in (tokenize.STRING, tokenize.NEWLINE):
            continue
        if row == 1 and token.type in (tokenize.INDENT, tokenize.DEDENT):
            continue  # of the enclosing block
        if token.type == tokenize.FSTRING_START:
            f_strings.append(token.start)
        elif token.type == tokenize.FSTRING_END:
            # Python versions tokenize f-strings differently, so the text of the whole f-string is one token here.
            start_row, start_column = f_strings.pop()
            if not f_strings:
                piece = lines[start_row - 1 : token.end[0]]
                piece[-1] = piece[-1][: token.end[1]]
                piece[0] = piece[0][start_column:]
                yield "".join(piece)
        elif not f_strings:
            if token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT):
                yield tokenize.tok_name[token.type]
            else:
                yield token.string


def _docstring_rows(node: _Definable) -> set[int]:
    rows: set[int] = set()
    for inner in ast.walk(node):
        if isinstance(inner, _Definable) and len(inner.body) > 1 and ast.get_docstring(inner) is not None:
            statement = inner.body[0]
            end = statement.end_lineno or statement.lineno
            if inner.lineno < statement.lineno and end < inner.body[1].lineno:
                rows.update(range(statement.lineno, end + 1))
    return rows
