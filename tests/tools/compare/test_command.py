"""`megatron-overlap compare` with real launches of Megatron on two CPU ranks."""

from __future__ import annotations

import gzip
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_overlap import cli
from tests.helpers.forked_python import ForkedPython
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


def compared(python: ForkedPython, folder: Path, *more: str) -> tuple[Path, str]:
    """Folder and output of one round of the tiny config against its baseline."""
    argv = [str(write_config(folder)), "--rounds", "1", *more, "--output", str(folder / "out"), "train.seed=7"]
    process = subprocess.run([*python.cli, "compare", *argv], capture_output=True, text=True, timeout=280)
    assert process.returncode == 0, process.stderr
    return folder / "out", process.stdout


@pytest.fixture(scope="module")
def done(forked_python: ForkedPython, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    return compared(forked_python, tmp_path_factory.mktemp("compare"), "overlap.trace=true", "train.eval_iterations=1")


@pytest.mark.long
def test_the_attribution_multiplies_to_the_speedup(forked_python: ForkedPython, tmp_path: Path) -> None:
    out, printed = compared(forked_python, tmp_path, "--attribute")
    written = json.loads((out / "compare.json").read_text())
    assert [run["name"] for run in written["runs"]] == ["tiny_baseline", "tiny", "tiny_serial"]
    parts = written["attribution"]
    product = parts["faster_collective"]["median"] * parts["overlap"]["median"]
    assert product == pytest.approx(written["speedup"]["median"])
    serial = written["runs"][2]["plugin"]
    assert serial["active"]
    assert serial["overlapped_calls"] > 0
    assert serial["fallbacks"] == []
    assert "Attribution: faster messages" in printed


def test_the_json_has_every_figure_of_both_runs(done: tuple[Path, str]) -> None:
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
        assert run["evaluation_ms"]["median"] > 0
    assert written["against_first"][0]["evaluation_speedup"]["median"] > 0
    # fp32: only the order of the additions differs.
    assert written["max_loss_deviation"] < 1e-5
    assert written["max_grad_norm_deviation"] < 1e-5
    assert written["link"]["kind"] == "loopback"
    assert written["versions"]["megatron_core"]


def test_only_the_overlapped_run_has_the_plugin_active(done: tuple[Path, str]) -> None:
    out, printed = done
    baseline, overlapped = json.loads((out / "compare.json").read_text())["runs"]
    assert not baseline["plugin"]["active"]
    assert overlapped["plugin"]["active"]
    assert overlapped["plugin"]["overlapped_calls"] > 0
    assert overlapped["plugin"]["fallbacks"] == []
    assert "round 1/1  tiny" in printed
    assert (out / "compare.png").stat().st_size > 20_000
    seeds = {yaml.safe_load(path.read_text())["train"]["seed"] for path in out.glob("runs/*/config.yaml")}
    assert seeds == {7}


@pytest.mark.long
def test_a_failed_rank_is_named_and_no_file_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, sys\nsys.exit('no memory left' if os.environ['RANK'] == '1' else 0)\n")
    out = tmp_path / "out"
    out.mkdir()
    (out / "compare.json").write_text("{}")  # from an earlier comparison
    assert cli.main(["compare", str(write_config(tmp_path, entry=str(script))), "--output", str(out)]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("compare: round 1 of 3, tiny_baseline: rank 1 on localhost: exit code 1")
    assert "no memory left" in printed
    assert not list(out.glob("compare.*"))


@pytest.mark.long
def test_a_run_without_steps_fails_the_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "nothing.py"
    script.write_text("")
    out = tmp_path / "out"
    assert cli.main(["compare", str(write_config(tmp_path, entry=str(script))), "--output", str(out)]) == 1
    assert "steps-rank0.jsonl: the last step is 0, must be 5" in capsys.readouterr().err
    assert not list(out.glob("compare.*"))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train.seed=1"], "give CONFIGS"),
        (["{config}", "overlap.tensor.method=none"], "has no overlap to compare with the stock path"),
        (["{config}", "{config}"], "two configs have this name"),
        (["{config}", "--rounds", "0"], "--rounds"),
        (["{config}", "train.iterations=2"], "must be at least 3"),
        (["{config}", "--output", "{config}"], "give a path that can be written"),
        (["{config}", "trian.seed=2"], "train"),
        (["missing.yaml"], "missing.yaml"),
        (["{config}", "--engine", "static"], "--engine: static: needs --generate"),
    ],
)
def test_wrong_requests_are_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tmp_path)
    assert cli.main(["compare", *(text.format(config=config) for text in argv)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_the_report_names_the_timeline_of_one_step_of_each_run(done: tuple[Path, str]) -> None:
    out, _ = done
    page = (out / "compare.html").read_text()
    commands = re.findall("<code>(megatron-overlap trace .*)</code>", page)
    for run, command in zip(json.loads((out / "compare.json").read_text())["runs"], commands, strict=True):
        step = run["typical_step"]
        assert step["step_time_ms"] in run["step_times_ms"][0]
        assert cli.main(command.split()[1:]) == 0
        trace = json.loads(gzip.decompress((out / f"runs/round1-{run['name']}/trace.json.gz").read_bytes()))
        assert f"step {step['iteration']}" in {event["name"] for event in trace["traceEvents"]}
