"""`megatron-overlap simulate`: its output, its errors and published results that it must reproduce."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_overlap import cli
from megatron_overlap.config import load_launch_config
from megatron_overlap.tools.simulate.job import Job, job_of
from tests.config.test_wrong_input import environment

ROOT = Path(__file__).resolve().parents[3]
CONFIG = str(ROOT / "configs" / "gpu" / "llama3_8b_tp8" / "overlap.yaml")


def test_figures_and_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    argv = ["simulate", CONFIG, "--cluster", "h100_dgx", "--sweep", "--json", str(out)]
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    for text in (
        "Simulated step",
        "Simulated, not measured",
        "no overlap",
        "Flux-like fused kernels",
        "this plugin, sequence split",
        "memory of a rank",
    ):
        assert text in shown
    content = json.loads(out.read_text())
    step, methods = content["step"], content["methods"]
    assert step == methods["as configured"] == methods["this plugin, auto"]
    # Layer by layer, auto selects p2p only for a gain of more than 2 %.
    assert step["step_ms"] < 1.02 * min(methods[name]["step_ms"] for name in ("this plugin, p2p", "stock path"))
    assert 0.1 < step["mfu"] < 1
    assert step["step_ms"] < methods["stock path"]["step_ms"] < methods["no overlap"]["step_ms"]
    # 16 sequences of 8192 tokens on 8 devices.
    assert step["tokens_per_s_per_device"] == pytest.approx(16 * 8192 / 8 / step["step_ms"] * 1e3)
    best = content["sweep"]["best"]
    assert [row["step_ms"] for row in best] == sorted(row["step_ms"] for row in best)
    assert best[0]["step_ms"] <= step["step_ms"]


@pytest.mark.parametrize(("config", "key"), [("llama3_8b_up8", "ulysses"), ("llama3_8b_cp8_varlen", "varlen")])
def test_attention_that_is_not_simulated_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], config: str, key: str
) -> None:
    out = tmp_path / "out.json"
    assert cli.main(["simulate", f"gpu/{config}/overlap", "--json", str(out)]) == 0
    text = f"overlap.{key} is not simulated: attention is Megatron's ring over whole sequences."
    assert text in capsys.readouterr().out
    assert text in json.loads(out.read_text())["what"]


def test_a_shipped_config_is_found_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    """The GEMMs of GPT-3 13B on eight ranks are too small for chunks: `auto` selects the stock path for most layers."""
    assert cli.main(["simulate", "gpu/gpt3_13b_tp8/overlap"]) == 0
    shown = capsys.readouterr().out
    steps = [re.search(rf"{name} +([\d.]+)", shown) for name in ("plugin, auto", "stock path", "plugin, p2p")]
    auto, stock, p2p = (float(step[1]) for step in steps if step)
    assert auto <= stock < p2p


def test_a_model_that_does_not_fit_fails(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", CONFIG, "model.preset=llama3_70b", "--cluster", "l20_pcie"]
    assert cli.main(argv) == 1
    assert "does not fit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cluster", "h1000_dgx"], "unknown profile; did you mean h100_dgx"),
        (["train.precision=fp32"], "train.precision: fp32: the profile h100_dgx has no peak"),
        (
            ["megatron_args=[--num-experts, '8']"],
            "megatron_args: --expert-tensor-parallel-size 8: the",
        ),
        (["megatron_args=[--num-layers-per-virtual-pipeline-stage, '5']"], "megatron_args.0: 5: must divide the 32"),
        (
            ["megatron_args=[--decoder-first-pipeline-num-layers, '5']"],
            "megatron_args.0: --decoder-first-pipeline-num-layers: the simulator models equal stages only",
        ),
        (["--json", "/nowhere/at/all.json"], "simulate --json: /nowhere/at/all.json"),
    ],
)
def test_a_wrong_request_prints_one_line(more: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", CONFIG, *more]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_launch_hosts_set_the_link_rate(tmp_path: Path) -> None:
    def step_ms(gbps: float) -> float:
        out = tmp_path / f"{gbps}.json"
        config = str(ROOT / "configs" / "cpu" / "llama_tp2" / "netlab.yaml")
        argv = ["simulate", config, f"launch.hosts.gbps={gbps}", "--cluster", "netlab", "--json", str(out)]
        assert cli.main(argv) == 0
        return float(json.loads(out.read_text())["methods"]["no overlap"]["step_ms"])

    assert step_ms(0.1) > 2 * step_ms(1.0)


def test_torch_is_not_imported() -> None:
    work = f"from megatron_overlap import cli; assert cli.main(['simulate', {CONFIG!r}]) == 0"
    check = "import sys; loaded = {'torch', 'megatron', 'numpy'} & set(sys.modules); assert not loaded, loaded"
    argv = [sys.executable, "-c", f"{work}\n{check}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False, env=environment())
    assert done.returncode == 0, done.stderr


def test_megatron_arguments_that_change_the_step() -> None:
    def job(*args: str) -> Job:
        listed = ", ".join(f"'{arg}'" for arg in args)
        overrides = ["parallel.tensor=2", "parallel.pipeline=4", f"megatron_args=[{listed}]"]
        return job_of(load_launch_config(CONFIG, overrides))

    assert (job().virtual, job().gradient_bytes) == (1, 4)
    assert job("--grad-reduce-in-bf16").gradient_bytes == 2
    assert job().vocabulary == 128256
    assert job("--make-vocab-size-divisible-by", "2001").vocabulary == 33 * 2 * 2001
    # Eight layers a stage: two a chunk make four chunks.
    assert job("--num-layers-per-virtual-pipeline-stage", "2").virtual == 4
    assert job("--num-virtual-stages-per-pipeline-rank=2").virtual == 2


@pytest.mark.parametrize(
    ("precision", "args", "expected"),
    [
        ("fp32", "--grad-reduce-in-bf16", 4),
        ("fp16", "", 2),
        ("fp16", "--accumulate-allreduce-grads-in-fp32", 4),
        ("bf16", "", 4),
    ],
)
def test_the_bytes_of_gradients_are_those_of_megatron(precision: str, args: str, expected: int) -> None:
    job = job_of(load_launch_config(CONFIG, [f"train.precision={precision}", f"megatron_args=[{args}]"]))
    assert job.gradient_bytes == expected


def test_a_narrow_terminal_shows_all_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["simulate", CONFIG]) == 0
    assert "\u2026" not in capsys.readouterr().out


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_published_results_are_within_the_bounds_as_the_page_says() -> None:
    papers = script("simulate_papers")
    rows = [row for part in (papers.flux, papers.commfuse, papers.torchtitan, papers.megatron) for row in part()]
    asked = [row for row in rows if row.bound is not None]
    assert [row.what for row in asked if row.verdict == "MISS"] == []
    assert len(asked) == 12 + 3 + 3 + 9
    page = " ".join((ROOT / "docs" / "simulate.md").read_text().split())
    assert f"all {len(asked)} rows are within their bounds" in page
