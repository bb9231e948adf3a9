"""The kernels as they are, or with lines of their source changed and loaded under another name."""

from __future__ import annotations

import hashlib
import importlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

PACKAGE = "megatron_overlap.kernels"


class Edit(NamedTuple):
    """One change: in `module` of the kernels, `old` (which stands there exactly once) becomes `new`."""

    module: str
    old: str
    new: str


def kernels(module: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """`megatron_overlap.kernels.<module>`, or a copy of the package with `edits` made in its text."""
    if not edits:
        return importlib.import_module(f"{PACKAGE}.{module}")
    name = "mutant_" + hashlib.sha256(repr(edits).encode()).hexdigest()[:12]
    if name not in sys.modules:
        source = Path(importlib.import_module(PACKAGE).__file__ or "").parent
        folder = Path(tempfile.mkdtemp(prefix="mutant-"))
        (folder / name).mkdir()
        for file in source.glob("*.py"):
            text = file.read_text()
            for edit in edits:
                if edit.module == file.stem:
                    assert text.count(edit.old) == 1, (
                        f"{edit.module}: {edit.old!r} stands there {text.count(edit.old)}x"
                    )
                    text = text.replace(edit.old, edit.new)
            (folder / name / file.name).write_text(text.replace(PACKAGE, name))
        sys.path.insert(0, str(folder))
    return importlib.import_module(f"{name}.{module}")
