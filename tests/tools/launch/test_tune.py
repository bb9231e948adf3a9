"""`megatron-overlap tune`: its short run, its errors and the cache that it fills."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.config import load_launch_config
from megatron_overlap.tools.launch.command import short_run

CONFIG = """
name: tiny
model: {{preset: llama_tiny, num_layers: 1, hidden_size: 64, ffn_hidden_size: 128}}
parallel: {{tensor: 2, sequence_parallel: true}}
train: {{seq_length: 64, micro_batch_size: 1, global_batch_size: 8, iterations: 100, precision: fp32,
         save: {folder}/saved, save_interval: 1}}
overlap: {{tensor: {{method: auto, autotune_cache: {folder}/autotune}}}}
launch: {{device: cpu, output_dir: {folder}/runs, timeout_s: 250}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def test_a_short_run_is_the_same_job_without_checkpoints(config: Path) -> None:
    cfg = load_launch_config(config)
    short = short_run("tiny.yaml", cfg)
    assert (short.name, short.train.iterations, short.train.save) == ("tiny_tune", 60, None)
    assert (short.model, short.parallel, short.overlap) == (cfg.model, cfg.parallel, cfg.overlap)
    warm = load_launch_config(config, ["train.lr_warmup_iterations=70"])
    assert short_run("tiny.yaml", warm).train.iterations == 71
    many = load_launch_config(config, ["launch.device=cuda"])
    assert short_run("tiny.yaml", many).train.iterations > 60, "fused kernels have variants"


def test_a_short_run_measures_two_paths_of_each_layer_of_experts(config: Path) -> None:
    """35 trials of two calls of each path, and a tenth more, with eight micro-batches in a step."""
    arguments = "'--num-experts', '4', '--expert-model-parallel-size', '2', '--expert-tensor-parallel-size', '1'"
    overrides = ["overlap.expert.method=auto", f"megatron_args=[{arguments}]"]
    alone = [
        "parallel.tensor=1",
        "parallel.sequence_parallel=false",
        "launch.ranks_per_node=2",
        "train.global_batch_size=16",
    ]
    assert short_run("tiny.yaml", load_launch_config(config, [*overrides, *alone])).train.iterations == 2 + 20
    assert short_run("tiny.yaml", load_launch_config(config, overrides)).train.iterations == 60


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["overlap.tensor.method=p2p"], "overlap.tensor.method: p2p: tune needs auto: add overlap.tensor.method=auto"),
        (["overlap.tensor.autotune_cache=null"], "overlap.tensor.autotune_cache: null: name a folder for the cache"),
        (
            ["parallel.tensor=1", "parallel.sequence_parallel=false"],
            "parallel.tensor: 1: autotuning needs tensor parallelism",
        ),
    ],
)
def test_an_impossible_request_prints_one_line(
    config: Path, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["tune", str(config), *overrides]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.long
def test_tune_fills_the_cache(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", str(config), "--run-dir", str(tmp_path / "first")]) == 0
    output = capsys.readouterr().out
    assert len((tmp_path / "first" / "steps-rank0.jsonl").read_text().splitlines()) == 60
    assert "column 64->" in output
    files = list((tmp_path / "autotune").glob("*.json"))
    assert f"{len(files)} selections are in" in output
    assert files
    assert not (tmp_path / "saved").exists()
    log = (tmp_path / "first" / "logs").glob("*")
    assert all("Traceback" not in path.read_text() for path in log if path.is_file())
