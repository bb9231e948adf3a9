"""The engine on the oldest supported release, in a separate process."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.releases import OLDEST, ROOT, release_environment


@pytest.mark.long
def test_engine_on_the_oldest_release() -> None:
    environment = {**release_environment(OLDEST), "EXPECTED_MEGATRON": OLDEST}
    command = [sys.executable, "-m", "pytest", "tests/patching/test_megatron.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert " passed" in done.stdout  # a second -q would hide it, and so would a run of nothing
    assert "skipped" not in done.stdout
