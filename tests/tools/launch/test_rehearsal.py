"""What a rehearsal folds and what it leaves alone; when it passes; and one for real."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap import cli
from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config, to_megatron_args
from megatron_overlap.config.megatron_args import CPU_SWITCHES, CPU_VALUES, flags_in
from megatron_overlap.tools.launch.downscale import fold
from megatron_overlap.tools.launch.rehearsal import judge
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecord

CONFIGS = Path(__file__).parents[3] / "configs"
ON_GPUS = [file for file in sorted(CONFIGS.glob("*_overlap.yaml")) if load_launch_config(file).launch.device == "cuda"]


def flags(cfg: LaunchConfig) -> set[str]:
    return {flag for _, flag in flags_in(to_megatron_args(cfg))}


@pytest.mark.parametrize("max_ranks", [2, 4, 8])
@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.stem)
def test_a_shipped_config_folds(file: Path, max_ranks: int, tmp_path: Path) -> None:
    """It fits, keeps its kinds of parallelism as far as it can, tensor first, and asks Megatron for the same things."""
    overrides = []
    if "_varlen" in file.stem:
        for suffix in (".bin", ".idx"):
            (tmp_path / f"documents{suffix}").touch()
        overrides = ["data.kind=indexed", f"data.path={tmp_path}/documents"]
    cfg = load_launch_config(file, overrides)
    folded, changes = fold(cfg, max_ranks)
    assert folded.world_size <= max_ranks
    kept = "tensor" if cfg.parallel.tensor > 1 else "context"
    assert getattr(folded.parallel, kept) == 2
    assert folded.parallel.sequence_parallel == cfg.parallel.sequence_parallel
    if max_ranks == 8:
        assert folded.parallel.pipeline == min(cfg.parallel.pipeline, 2)
        assert folded.data_parallel_size == min(cfg.data_parallel_size, 2)
    # So small a model would choose Megatron's own path, and rehearse nothing.
    chooses = cfg.overlap.tensor.method == "auto"
    tensor = {**cfg.overlap.tensor.model_dump(), **({"method": "p2p"} if chooses else {})}
    assert folded.overlap.model_dump() == {**cfg.overlap.model_dump(), "tensor": tensor}
    assert [change.now for change in changes if change.key == "overlap.tensor.method"] == ["p2p"] * chooses
    gone = {"--group-query-attention", "--num-query-groups"} if folded.model.num_query_groups > 1 else set()
    only_with_copies = {"--overlap-grad-reduce", "--overlap-param-gather"} if folded.data_parallel_size == 1 else set()
    assert flags(cfg) - flags(folded) <= only_with_copies - gone
    assert flags(folded) - flags(cfg) <= {*CPU_SWITCHES, *CPU_VALUES, "--no-gradient-accumulation-fusion"}
    assert {change.key for change in changes} >= {"ranks", f"parallel.{kept}", "model.hidden_size", "launch.device"}


def test_documents_are_not_made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_launch_config(CONFIGS / "llama3_8b_cp8_varlen_overlap.yaml")
    with pytest.raises(ConfigError, match="data.path: data/stdlib: .*prepare_data.py makes some"):
        fold(cfg, 4)


def test_every_difference_is_named() -> None:
    file = CONFIGS / "gpt3_175b_tp8_pp16_overlap.yaml"
    cfg = load_launch_config(file, ["train.lr_warmup_iterations=5", "train.save=ckpt", "train.save_interval=9"])
    folded, changes = fold(cfg, 4)
    named = {change.key: (change.was, change.now) for change in changes}
    assert named["data parallel"] == ("2", "1")
    assert named["parallel.pipeline"] == ("16", "2")
    assert named["train.save"] == ("ckpt", "null")
    assert named["train.lr_warmup_iterations"] == ("5", "1")
    silent = {"preset", "max_position_embeddings", "workers", "nodes", "ranks_per_node", "threads_per_rank"}
    for section in ("model", "parallel", "train", "data", "launch"):
        before, after = getattr(cfg, section).model_dump(), getattr(folded, section).model_dump()
        differing = {key for key in before if before[key] != after[key]} - silent
        assert {f"{section}.{key}" for key in differing} <= set(named)


def test_the_shape_keeps_its_proportions() -> None:
    cfg = load_launch_config(CONFIGS / "llama3_70b_tp4_pp8_overlap.yaml")
    model = fold(cfg, 4)[0].model
    assert (model.num_layers, model.num_attention_heads, model.num_query_groups) == (2, 8, 2)
    assert model.ffn_hidden_size / model.hidden_size == pytest.approx(28672 / 8192, rel=0.05)
    assert (model.normalization, model.rotary_base) == ("RMSNorm", 500000)


def with_args(*args: str) -> tuple[LaunchConfig, dict[str, str]]:
    cfg = load_launch_config(CONFIGS / "gpt3_175b_tp8_pp8_overlap.yaml", [f"megatron_args={list(args)}"])
    folded, changes = fold(cfg, 4)
    return folded, {change.was: change.now for change in changes if change.key == "megatron_args"}


def test_what_needs_a_gpu_is_left_out_by_name_and_the_rest_stays() -> None:
    given = ("--fp8-format", "hybrid", "--exit-interval", "3", "--moe-grouped-gemm", "--num-experts=4")
    folded, named = with_args(*given)
    assert folded.megatron_args == ("--exit-interval", "3", "--num-experts=4")
    assert named == {"--fp8-format hybrid": "left out", "--moe-grouped-gemm": "left out"}


def test_interleaved_stages_are_folded_with_their_layers() -> None:
    folded, named = with_args("--num-layers-per-virtual-pipeline-stage=4")
    assert folded.megatron_args == ("--num-layers-per-virtual-pipeline-stage", "1")
    assert (folded.parallel.pipeline, folded.model.num_layers) == (2, 4)
    assert named == {
        "--num-layers-per-virtual-pipeline-stage=4": "--num-layers-per-virtual-pipeline-stage 1",
    }


def test_experts_are_folded() -> None:
    cfg = load_launch_config(CONFIGS / "mixtral_8x7b_tp4_ep8_overlap.yaml")
    args = list(fold(cfg, 2)[0].megatron_args)
    assert args[args.index("--expert-model-parallel-size") + 1] == "2"
    assert args[args.index("--num-experts") + 1] == "8"


def test_transformer_engine_and_fp16_are_replaced_by_name() -> None:
    overrides = ["train.transformer_impl=transformer_engine", "train.precision=fp16", "overlap.tensor.method=none"]
    overrides += ["parallel.tensor=4", "parallel.context=2", "launch.entry=pretrain_gpt.py"]
    folded, changes = fold(load_launch_config(CONFIGS / "gpt3_1.3b_tp8_overlap.yaml", overrides), 2)
    named = {change.key: (change.was, change.now) for change in changes}
    assert named["train.transformer_impl"] == ("transformer_engine", "local")
    assert named["train.precision"] == ("fp16", "bf16")
    assert named["parallel.context"] == ("2", "1")
    assert folded.train.precision == "bf16"


def folded_tiny(precision: str = "fp32") -> LaunchConfig:
    return fold(load_launch_config(CONFIGS / "llama3_8b_tp8_overlap.yaml", [f"train.precision={precision}"]), 2)[0]


STOCK = RunRecord((1, 2), (1.0, 1.0), (8.0, 7.9), (3.0, 3.1), None, {}, None)
ON = PluginReport(True, "", 24, 100, ())


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"losses": (8.0, 7.9 * (1 + 9e-6))}, None),
        ({"losses": (8.0, 7.9 * (1 + 2e-5))}, "step 2: loss"),
        ({"grad_norms": (3.0 * 1.05, 3.1)}, "step 1: grad-norm"),
        ({"losses": (math.nan, 7.9)}, "step 1: loss"),
        ({"grad_norms": (3.0, None)}, "step 2: grad-norm"),
        ({"report": dataclasses.replace(ON, overlapped_calls=0)}, "no call was overlapped"),
        ({"report": None}, "no call was overlapped"),
    ],
)
def test_the_verdict(changed: dict[str, Any], says: str | None) -> None:
    failures = judge(STOCK, dataclasses.replace(STOCK, **{"report": ON, **changed}), folded_tiny()).failures
    assert [says in failure for failure in failures] == ([True] if says else [])


def test_runs_that_are_both_no_number_have_not_passed() -> None:
    broken = dataclasses.replace(STOCK, losses=(math.nan, math.nan), report=ON)
    assert len(judge(broken, broken, folded_tiny()).failures) == 2


@pytest.mark.long
def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config for eight GPUs, on two CPU processes of this machine, twice."""
    config = CONFIGS / "llama3_8b_tp8_overlap.yaml"
    argv = ["launch", str(config), "--rehearse", "--rehearse-ranks", "2", "--run-dir", str(tmp_path)]
    assert cli.main([*argv, "train.precision=fp32"]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert "rehearsal passed" in said
    assert "parallel.tensor" in said
    runs = sorted(path.name for path in tmp_path.iterdir())
    assert runs == ["llama3_8b_tp8_overlap_rehearsal", "llama3_8b_tp8_overlap_rehearsal_baseline"]


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--rehearse-ranks", "2"], "command line: launch --rehearse-ranks: 2: needs --rehearse"),
        (["--rehearse", "--rehearse-ranks", "0"], "command line: launch --rehearse-ranks: 0"),
        (["--rehearse", "parallel.tensor=3"], "{base}: launch.ranks_per_node: 8: 8 ranks cannot"),
    ],
)
def test_a_wrong_request_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "llama3_8b_tp8_overlap.yaml"
    assert cli.main(["launch", str(config), *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(says.format(base=CONFIGS / "base" / "gpus.yaml")), line
