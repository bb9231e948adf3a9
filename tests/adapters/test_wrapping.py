"""Helpers of the methods that replace Megatron's."""

from __future__ import annotations

import contextlib

from megatron_overlap.adapters.wrapping import replaced
from tests.adapters import wrapping_workers as cases
from tests.helpers.world import World


def test_torch_compile_does_not_trace_an_operation_that_communicates() -> None:
    """It compiles the code before, between and after the operations."""
    workers = World(answer_s=120)
    try:
        for traced, graphs, equal in workers.run(2, cases.compiled):
            assert not traced
            assert graphs == 3
            assert equal == [True] * 4
    finally:
        workers.close()


def test_replaced_items_are_restored() -> None:
    items = {"kept": 1, "changed": 2}
    with contextlib.suppress(RuntimeError), replaced(items, changed=3, added=4):
        assert items == {"kept": 1, "changed": 3, "added": 4}
        raise RuntimeError
    assert items == {"kept": 1, "changed": 2}
