"""What the workers run for test_timed.py."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch.distributed as dist

from megatron_overlap.tools.doctor import timed

APART_US, TAKES_S = 2e4, 0.005


def apart(group: dist.ProcessGroup) -> tuple[float, list[float]]:
    """The figure, and when each call began on this rank."""
    began = []

    def run() -> None:
        began.append(time.monotonic())
        time.sleep(TAKES_S)

    with patch.object(timed, "_APART_US", APART_US):
        return timed.apart_us(run, group), began
