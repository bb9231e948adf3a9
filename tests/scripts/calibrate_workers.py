"""The worker programs of test_calibrate.py."""

from __future__ import annotations

import time
from unittest.mock import patch

import torch.distributed as dist

from scripts import calibrate

APART_US, RUN_S = 2e4, 0.005


def apart(group: dist.ProcessGroup) -> tuple[float, list[float]]:
    """The measured time, and the start of each call on this rank."""
    starts = []

    def run() -> None:
        starts.append(time.monotonic())
        time.sleep(RUN_S)

    with patch.object(calibrate, "_APART_US", APART_US):
        return calibrate.apart_us(run, group), starts
