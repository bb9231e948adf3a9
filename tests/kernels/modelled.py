"""Loads the Gluon kernels, unchanged or edited, on top of `tests.kernels.gluon_model`."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from megatron_overlap.kernels import launch
from tests.helpers.mutants import Edit

_MODULES = ("launch", "primitives", "hopper_gemm", "ag_gemm", "gemm_rs")
_HERE = "megatron_overlap.kernels"
_MODEL = "tests.kernels.gluon_model"


def modelled(module: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """`megatron_overlap.kernels.<module>` on the model. `edits` name modules relative to `kernels`."""
    name = "modelled_" + hashlib.sha256(repr(tuple(edits)).encode()).hexdigest()[:12]
    if name not in sys.modules:
        folder = Path(tempfile.mkdtemp(prefix="modelled-", dir=os.environ.get("COPIES_FOLDER")))
        (folder / name).mkdir()
        (folder / name / "__init__.py").touch()
        for each in _MODULES:
            text = (Path(launch.__file__).parent / f"{each}.py").read_text()
            for edit in edits:
                if edit.module == each:
                    assert text.count(edit.old) == 1, f"{each}: {edit.old!r} occurs {text.count(edit.old)}x"
                    text = text.replace(edit.old, edit.new)
            (folder / name / f"{each}.py").write_text(_over_the_model(text, name))
        sys.path.insert(0, str(folder))
        importlib.import_module(name)
        importlib.import_module(f"{name}.{module}")
        sys.path.remove(str(folder))
    return importlib.import_module(f"{name}.{module}")


def _over_the_model(text: str, name: str) -> str:
    text = text.replace(f"{_HERE}.gluon_version", _MODEL).replace("TRITON_TYPES[a.dtype]", "a.dtype")
    text = text.replace("import triton.language as tl", f"from {_MODEL} import tl")
    text = text.replace("import triton\n", f"from {_MODEL} import triton\n")
    for each in _MODULES:
        text = text.replace(f"{_HERE}.{each} ", f"{name}.{each} ")
    return text.replace(f"from {_HERE} import primitives", f"from {name} import primitives")
