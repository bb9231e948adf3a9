"""The package with lines of its source changed, loaded under another name: a test must notice each change."""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import megatron_overlap

_NAME = "megatron_overlap"


class Edit(NamedTuple):
    """One change: in `module` (below the package, dotted), `old`, which stands there exactly once, becomes `new`."""

    module: str
    old: str
    new: str


def load(module: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """`megatron_overlap.<module>`, or that of a copy of the package with `edits` made in its text."""
    if not edits:
        return importlib.import_module(f"{_NAME}.{module}")
    name = "mutant_" + hashlib.sha256(repr(edits).encode()).hexdigest()[:12]
    if name not in sys.modules:
        folder = Path(tempfile.mkdtemp(prefix="mutant-", dir=os.environ.get("COPIES_FOLDER")))
        source = Path(megatron_overlap.__file__).parent
        shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for edit in edits:
            file = folder / name / (edit.module.replace(".", "/") + ".py")
            text = file.read_text()
            assert text.count(edit.old) == 1, f"{edit.module}: {edit.old!r} stands there {text.count(edit.old)}x"
            file.write_text(text.replace(edit.old, edit.new))
        for file in (folder / name).rglob("*.py"):
            file.write_text(file.read_text().replace(_NAME, name))
        sys.path.insert(0, str(folder))
        importlib.import_module(name)
        sys.path.remove(str(folder))
    return importlib.import_module(f"{name}.{module}")
