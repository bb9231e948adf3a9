"""The parts of scripts/bench/fused_one_gpu.py that need no GPU. The measurement itself has never run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts/bench/fused_one_gpu.py"


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("fused_one_gpu", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fused_one_gpu"] = module
    spec.loader.exec_module(module)
    return module


def test_figures(script: Any) -> None:
    """Hidden wholly, not at all, and worse than in series."""
    hidden = script.overlap_figures(2.0, 1.0, 2.0)
    assert (hidden["eta"], hidden["overlap_efficiency"], hidden["ect_ms"]) == (1, 1, 0)
    serial = script.overlap_figures(2.0, 1.0, 3.0)
    assert (serial["eta"], serial["overlap_efficiency"], serial["over_serial"]) == (0, 0, 1)
    assert script.overlap_figures(2.0, 1.0, 4.0)["eta"] == -1


def test_bytes_of_a_link(script: Any) -> None:
    gather = script.Shape("x", "ag", m=1024, n=16, k=32)
    assert gather.link_bytes == 7 * 128 * 32 * 2
    assert script.Shape("x", "rs", m=1024, n=16, k=32).link_bytes == 7 * 128 * 16 * 2
    assert gather.flops == 2 * 1024 * 16 * 32
    assert script.pace_s(450_000_000, 450.0) == pytest.approx(1e-3)


def test_shapes_are_whole_on_eight_ranks(script: Any) -> None:
    assert {shape.op for shape in script.shapes()} == {"ag", "rs"}
    assert all(shape.m % shape.ranks == 0 for shape in script.shapes())
    assert ("flux m4096", 6144, 12288) in [(shape.name, shape.n, shape.k) for shape in script.shapes()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    run = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("no CUDA device")
