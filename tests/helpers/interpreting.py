"""Workers whose Triton is the interpreter: the switch is read when triton is imported, so not in this process."""

from __future__ import annotations

import os

from tests.helpers.world import World


def interpreting_world(size: int) -> World:
    """`size` interpreting workers."""
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        # Five processes on two cores, in an interpreter: slow, and not what is tested.
        return World(size, answer_s=900)
    finally:
        del os.environ["TRITON_INTERPRET"]
