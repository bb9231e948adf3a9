"""scripts/soak.py: what it calls flat, and that its steps run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.soak import judge
from tests.helpers.releases import ROOT


def samples(**growing: float) -> list[dict[str, float]]:
    """Hundred samples; what is named grows by so much a sample after the warm-up."""
    level = {"rss_mib": 300.0, "fds": 20.0, "threads": 5.0}
    return [
        {"step": 10.0 * n, **{name: at + growing.get(name, 0.0) * max(0, n - 25) for name, at in level.items()}}
        for n in range(1, 101)
    ]


def test_what_grows_is_named() -> None:
    assert judge([samples(), samples(rss_mib=0.05)], 1000) == []
    (leak,) = judge([samples(), samples(rss_mib=0.5)], 1000)
    assert leak.startswith("rank 1: ")
    assert leak.endswith("MiB more after the warm-up")
    (files,) = judge([samples(fds=1)], 1000)
    assert files.startswith("rank 0: more fds")
    (threads,) = judge([samples(threads=1)], 1000)
    assert threads.startswith("rank 0: more threads")
    assert judge([samples()[:50], []], 1000) == ["rank 0 made 500 of 1000 steps", "rank 1 made 0 of 1000 steps"]


@pytest.mark.long
def test_every_op_runs(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, "scripts/soak.py", "--steps", "200", "--ranks", "3", "--json", str(file)]
    done = subprocess.run([*command, "--png", str(tmp_path / "soak.png")], cwd=ROOT, text=True, capture_output=True)
    assert "Traceback" not in done.stderr, done.stderr
    assert [rows[-1]["step"] for rows in json.loads(file.read_text())["ranks"]] == [200] * 3
    assert (tmp_path / "soak.png").stat().st_size > 5000
