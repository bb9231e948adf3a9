"""The parts of scripts/gpu/first_contact.py that need no GPU. A GPU runs the rest."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.forked_python import ForkedPython

SCRIPT = Path(__file__).parents[2] / "scripts/gpu/first_contact.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("first_contact", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["first_contact"] = module
    spec.loader.exec_module(module)
    return module


def test_figures(script: Any) -> None:
    """Hidden wholly, not at all, and worse than in series."""
    overlap_figures = importlib.import_module("one_gpu.shapes").overlap_figures
    hidden = overlap_figures(2.0, 1.0, 2.0)
    assert (hidden["eta"], hidden["overlap_efficiency"], hidden["ect_ms"]) == (1, 1, 0)
    serial = overlap_figures(2.0, 1.0, 3.0)
    assert (serial["eta"], serial["overlap_efficiency"], serial["over_serial"]) == (0, 0, 1)
    assert overlap_figures(2.0, 1.0, 4.0)["eta"] == -1


def test_bytes_of_a_link(script: Any) -> None:
    shapes = importlib.import_module("one_gpu.shapes")
    gather = shapes.Shape("x", "ag", m=1024, n=16, k=32)
    assert gather.link_bytes == 7 * 128 * 32 * 2
    assert shapes.Shape("x", "rs", m=1024, n=16, k=32).link_bytes == 7 * 128 * 16 * 2
    assert gather.flops == 2 * 1024 * 16 * 32
    assert importlib.import_module("one_gpu.device").pace_s(450_000_000, 450.0) == pytest.approx(1e-3)


def test_shapes_are_whole_on_eight_ranks(script: Any) -> None:
    found = importlib.import_module("one_gpu.shapes").shapes()
    assert {shape.op for shape in found} == {"ag", "rs"}
    assert all(shape.m % shape.ranks == 0 for shape in found)
    assert ("flux m4096", 6144, 12288) in [(shape.name, shape.n, shape.k) for shape in found]


def dry(
    tmp_path: Path, *arguments: str, python: str = sys.executable
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    file = tmp_path / "figures.json"
    command = [python, SCRIPT, "--dry-run", "--json", file, *arguments]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return run, json.loads(file.read_text())


@pytest.mark.long
@pytest.mark.timeout(600)
def test_parts_run_in_the_interpreter(tmp_path: Path) -> None:
    """The same lines as on a GPU, but for streams and events; a mutant is noticed, nothing is wrong."""
    run, figures = dry(tmp_path, "--only", "correct", "--only", "overlap", "--budget", "300")
    assert run.returncode == 0, run.stderr
    assert all(row["mutant_noticed"] for row in figures["correct"]["rows"])
    assert [row["op"] for row in figures["overlap"]["rows"]] == ["ag", "rs"] * 2
    assert "gemm" not in figures


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_part_runs_in_the_interpreter(tmp_path: Path) -> None:
    run, figures = dry(tmp_path, "--budget", "600")
    assert run.returncode == 0, run.stderr
    for name in ("correct", "gemm", "overlap", "split", "processes", "stress", "hopper", "link 1", "link 8", "copies"):
        assert figures[name]["how"] == "ended"
        assert figures[name]["rows"]
        assert figures[name]["wrong_rows"] == 0
    assert len(figures["processes"]["rows"]) == 24
    assert figures["stress"]["rows"][-1]["launches"] >= 16


def test_one_rank_runs_the_operations_over_copies_to_the_host(tmp_path: Path) -> None:
    run, figures = dry(tmp_path, "--only", "link 1", "--budget", "100")
    assert run.returncode == 0, run.stderr
    assert [(row["op"], row["share"], row["right"]) for row in figures["link 1"]["rows"]] == [
        (op, share, True) for op in ("ag", "rs") for share in (8, 1)
    ]


def test_hopper_kernels_are_left_out_by_name(forked_python: ForkedPython, tmp_path: Path) -> None:
    run, figures = dry(tmp_path, "--only", "hopper", "--budget", "60", python=forked_python.executable)
    assert run.returncode == 0, run.stderr
    assert figures["hopper"]["how"] == "ended"
    assert figures["hopper"]["rows"] == [{"what": "trial", "left_out": "nothing interprets Gluon"}]


def test_what_ends_a_part_leaves_what_was_measured(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that fails or hangs is told and the others are measured; what a process printed half is left out."""
    monkeypatch.setattr(script, "GRACE_S", 0.1)
    found = script.measure("split", True, 0.1)
    assert found["how"].startswith("killed after 0 s: a deadlock")
    run, figures = dry(tmp_path, "--only", "split", "--only", "gemm", "--budget", "12")
    assert run.returncode == 1
    assert figures["gemm"]["how"] == "no time left"
    assert "failed parts: gemm" in run.stderr
    parsed = importlib.import_module("part_process").parsed
    assert parsed('{"a": 1') is None
    assert parsed("3") is None
    assert parsed('{"a": 1}') == {"a": 1}


def test_a_process_that_no_signal_ends_is_left_behind(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver of a GPU that hangs keeps it. What it has printed, and the parts behind it, are not lost."""
    part_process = importlib.import_module("part_process")
    killed: list[int] = []
    monkeypatch.setattr(part_process, "KILL_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda group, number: killed.append(group))
        found = part_process.run_process(["sh", "-c", "echo '{}'; sleep 20"], os.environ, 1.0)
    os.killpg(killed[0], signal.SIGKILL)
    assert found["how"].startswith("killed after 1 s")
    assert found["rows"] == [{}]
    assert found["seconds"] < 15


@pytest.mark.parametrize("home", ["/proc/no home", ""])
def test_kernels_are_cached_where_triton_can_write(
    script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    for name in ("TRITON_HOME", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", home or str(tmp_path))
    monkeypatch.setattr(script, "run_process", lambda _, environment, limit_s: dict(environment))
    found = script.measure("gemm", False, 1.0).get("TRITON_CACHE_DIR")
    assert found is None if not home else Path(found).parent.is_dir()


def test_gemm_runs_all_shapes_before_it_compiles_the_next_tile_shape(
    script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = importlib.import_module("one_gpu.parts")
    calls: list[tuple[str, bool]] = []

    def gemm_row(kernels: Any, shape: Any, dry: bool, other: Any) -> dict[str, Any]:
        calls.append((shape.op, other is None))
        return {}

    monkeypatch.setattr(parts, "gemm_row", gemm_row)
    assert list(parts.gemm(True, time.perf_counter() + 60)) == [{}] * 4
    assert calls == [("ag", True), ("rs", True), ("ag", False), ("rs", False)]
    assert list(parts.gemm(True, time.perf_counter())) == []


def test_a_row_that_is_wrong_is_seen(script: Any) -> None:
    for row in ({"wrong": 1}, {"gave_up": 3}, {"right": False}, {"failed": "x"}, {"mutant_noticed": False}):
        assert script.is_bad(row)
    assert not script.is_bad({"wrong": 0, "gave_up": 0, "right": True, "mutant_noticed": True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("no CUDA device")
