"""scripts/megatron_tests.py on a checkout that is made here: what passes, what is lost, and what hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.releases import ROOT

TESTS = """
import os, time
import pytest, torch
import megatron_overlap as mo
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

RANK = int(os.environ["RANK"])
PATCHED = hasattr(ColumnParallelLinear._forward_impl, "__wrapped__")

def test_right():
    assert torch.cuda.is_available()

def test_lost_with_the_plugin():
    assert not PATCHED

def test_wrong_on_one_rank():
    assert RANK == 0

def test_stuck_on_one_rank():
    if RANK == 1:
        time.sleep(60)

@pytest.mark.skip
def test_not_run():
    pass

def test_after_the_stuck_one():
    pass
"""


@pytest.mark.long
def test_outcomes_are_those_of_the_worst_rank(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    folder = checkout / "tests" / "unit_tests"
    folder.mkdir(parents=True)
    for package in (checkout / "tests", folder):
        (package / "__init__.py").touch()
    (folder / "test_some.py").write_text(TESTS)
    file = tmp_path / "result.json"
    command = [sys.executable, "scripts/megatron_tests.py", str(checkout), "--tests", "tests/unit_tests/test_some.py"]
    command += ["--ranks", "2", "--limit", "8", "--json", str(file)]
    done = subprocess.run(
        command, cwd=ROOT, text=True, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    (row,) = json.loads(file.read_text())["files"]
    assert row["off"] == {"passed": 3, "failed": 1, "hung": 1, "skipped": 1}
    assert row["on"] == {"passed": 2, "failed": 2, "hung": 1, "skipped": 1}
    assert row["changed"] == {"tests/unit_tests/test_some.py::test_lost_with_the_plugin": ["passed", "failed"]}
    assert "1 no longer pass" in done.stdout
