"""`megatron-overlap compare` with real launches of Megatron on two CPU ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_overlap import cli
from megatron_overlap.tools.compare.rounds import turn
from tests.tools.compare.test_comparison import KEYS, RUN_KEYS

ITERATIONS = 5


def write_config(folder: Path, **launch: object) -> Path:
    content = {
        "name": "tiny",
        "model": {"preset": "llama_tiny", "num_layers": 1},
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "train": {"seq_length": 64, "global_batch_size": 2, "iterations": ITERATIONS, "precision": "fp32"},
        "overlap": {"tensor": {"method": "p2p"}},
        "launch": {"device": "cpu", "timeout_s": 240, "output_dir": str(folder / "runs"), **launch},
    }
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def compared(folder: Path, *more: str) -> tuple[Path, str]:
    """Where one round of the tiny config against its baseline wrote its results, and what it printed."""
    argv = [str(write_config(folder)), "--rounds", "1", *more, "--output", str(folder / "out"), "train.seed=7"]
    process = subprocess.run(
        [sys.executable, "-m", "megatron_overlap.cli", "compare", *argv], capture_output=True, text=True, timeout=280
    )
    assert process.returncode == 0, process.stderr
    return folder / "out", process.stdout


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return compared(tmp_path_factory.mktemp("compare"), "overlap.trace=true")


@pytest.mark.long
def test_a_speedup_is_taken_apart(tmp_path: Path) -> None:
    out, said = compared(tmp_path, "--attribute")
    written = json.loads((out / "compare.json").read_text())
    assert [run["name"] for run in written["runs"]] == ["tiny_baseline", "tiny", "tiny_serial"]
    parts = written["attribution"]
    product = parts["faster_collective"]["median"] * parts["overlap"]["median"]
    assert product == pytest.approx(written["speedup"]["median"])
    serial = written["runs"][2]["plugin"]
    assert serial["active"]
    assert serial["overlapped_calls"] > 0
    assert serial["fallbacks"] == []
    assert "faster collective:" in said
    assert "overlap:" in said


def test_the_json_is_complete_and_true(done: tuple[Path, str]) -> None:
    out, _ = done
    written = json.loads((out / "compare.json").read_text())
    assert written.keys() >= KEYS
    assert [run["name"] for run in written["runs"]] == ["tiny_baseline", "tiny"]
    for run in written["runs"]:
        assert run.keys() >= RUN_KEYS
        assert 0 < run["step_time_ms"]["p20"] <= run["step_time_ms"]["median"] <= run["step_time_ms"]["p80"]
        assert len(run["step_times_ms"][0]) == ITERATIONS - 2
        assert len(run["losses"]) == len(run["grad_norms"]) == ITERATIONS
        assert 0 < run["mfu"] < 1
        assert run["mfu"] == pytest.approx(run["tflops_per_device"] / run["peak_tflops"])
        assert run["tokens_per_s"] == pytest.approx(128 / run["step_time_ms"]["median"] * 1000)
        assert run["peak_memory_bytes"] > 100e6
    # fp32: the sums differ in their order alone.
    assert written["max_loss_deviation"] < 1e-5
    assert written["max_grad_norm_deviation"] < 1e-5
    assert written["link"]["kind"] == "loopback"
    assert written["versions"]["megatron_core"]


def test_the_plugin_was_on_in_the_runs_that_say_so(done: tuple[Path, str]) -> None:
    out, said = done
    baseline, overlapped = json.loads((out / "compare.json").read_text())["runs"]
    assert not baseline["plugin"]["active"]
    assert overlapped["plugin"]["active"]
    assert overlapped["plugin"]["overlapped_calls"] > 0
    assert overlapped["plugin"]["fallbacks"] == []
    assert "round 1/1  tiny" in said
    assert (out / "compare.png").stat().st_size > 20_000
    seeds = {yaml.safe_load(path.read_text())["train"]["seed"] for path in out.glob("runs/*/config.yaml")}
    assert seeds == {7}


@pytest.mark.long
def test_a_rank_that_dies_is_named_and_there_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, sys\nsys.exit('no luck' if os.environ['RANK'] == '1' else 0)\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "compare.json").write_text("{}")  # of an earlier comparison
    assert cli.main(["compare", str(write_config(tmp_path, entry=str(script))), "--output", str(out)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("compare: round 1 of 3, tiny_baseline: rank 1 on localhost: exit code 1")
    assert "no luck" in said
    assert not list(out.glob("compare.*"))


@pytest.mark.long
def test_a_run_without_steps_is_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    out = tmp_path / "out"
    assert cli.main(["compare", str(write_config(tmp_path, entry=str(script))), "--output", str(out)]) == 1
    assert "steps-rank0.jsonl: the last step is 0, must be 5" in capsys.readouterr().err
    assert not list(out.glob("compare.*"))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["train.seed=1"], "CONFIGS is missing"),
        (["{config}", "overlap.tensor.method=none"], "nothing to compare with itself"),
        (["{config}", "{config}"], "two configs have this name"),
        (["{config}", "--rounds", "0"], "--rounds"),
        (["{config}", "train.iterations=2"], "must be at least 3"),
        (["{config}", "--output", "{config}"], "give a folder that can be written"),
        (["{config}", "trian.seed=2"], "train"),
        (["missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_requests_are_one_line(
    argv: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert cli.main(["compare", *(text.format(config=config) for text in argv)]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_a_step_of_each_run_is_drawn_from_its_events(done: tuple[Path, str]) -> None:
    out, _ = done
    page = (out / "compare.html").read_text()
    for run in json.loads((out / "compare.json").read_text())["runs"]:
        step = run["typical_step"]
        assert step["step_time_ms"] in run["step_times_ms"][0]
        assert f"round 1, iteration {step['iteration']}: {step['step_time_ms']:,.1f} ms" in page
    assert page.count(">rank 0</text>") == page.count(">rank 1</text>") == 2
    assert "<title>waits for all_gather_linear" in page
    assert "<title>messages of all_gather_linear" in page
    assert "All ranks of a run are on one clock" in page


def test_every_second_round_is_reversed() -> None:
    assert [turn(number, 3) for number in (1, 2, 3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
