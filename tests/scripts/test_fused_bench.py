"""scripts/bench/fused.py on a machine without GPUs: it says what is missing, and checks results in the interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts/bench/fused.py"


def launched(*arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run([*torchrun, SCRIPT, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.timeout(600)
@pytest.mark.long
def test_all_methods_agree(tmp_path: Path) -> None:
    file = tmp_path / "figures.json"
    run = launched("--check-only", "--interpret", "--json", str(file))
    assert run.returncode == 0, run.stderr
    assert "all results are right" in run.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["op"] for row in rows] == ["ag", "rs"]
    for row in rows:
        assert row["wrong"] == []
        # Nothing but what torch has no CPU form of may be left out.
        assert set(row["missing"]) <= {"torch fused"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.long
def test_without_gpus_it_says_so() -> None:
    run = launched()
    assert run.returncode != 0
    assert "0 CUDA devices for 2 ranks of this node" in run.stderr


def test_it_is_started_by_torchrun_and_does_not_time_the_interpreter() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "start it with torchrun" in run.stderr
    run = launched("--interpret")
    assert "add --check-only" in run.stderr
