"""Loads the kernels, unchanged or edited under another name."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

from tests.helpers import mutants
from tests.helpers.mutants import Edit

__all__ = ["Edit", "kernels"]


def kernels(module: str, edits: Sequence[Edit] = ()) -> ModuleType:
    """`megatron_overlap.kernels.<module>`. `edits` name modules relative to `kernels`."""
    return mutants.load(f"kernels.{module}", tuple(edit._replace(module=f"kernels.{edit.module}") for edit in edits))
