"""`downscale`, the comparison of a rehearsal, and one complete rehearsal."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap import cli
from megatron_overlap.config import ConfigError, LaunchConfig, load_launch_config, to_megatron_args
from megatron_overlap.config.megatron_args import (
    CPU_VALUES,
    EXPERT_PARALLEL,
    REHEARSAL_SWITCHES,
    flags_in,
    number_after,
)
from megatron_overlap.tools.launch.downscale import downscale
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.rehearsal import Rehearsal, rehearse
from megatron_overlap.tools.launch.run_records import PluginReport, RunRecord
from tests.helpers.forked_python import ForkedPython
from tests.helpers.te import needs_te

CONFIGS = Path(__file__).parents[3] / "configs" / "gpu"
ON_GPUS = sorted(CONFIGS.glob("*/overlap.yaml"))


def flags(cfg: LaunchConfig) -> set[str]:
    return {flag for _, flag in flags_in(to_megatron_args(cfg))}


@pytest.mark.parametrize("max_ranks", [2, 4, 8])
@pytest.mark.parametrize("file", ON_GPUS, ids=lambda file: file.parent.name)
def test_a_shipped_config_is_downscaled(file: Path, max_ranks: int, tmp_path: Path) -> None:
    """The result fits, keeps its kinds of parallelism, tensor first, and sets the same Megatron flags."""
    overrides = []
    if "_varlen" in file.parent.name:
        for suffix in (".bin", ".idx"):
            (tmp_path / f"documents{suffix}").touch()
        overrides = ["data.kind=indexed", f"data.path={tmp_path}/documents"]
    cfg = load_launch_config(file, overrides)
    downscaled, changes = downscale(cfg, max_ranks)
    assert downscaled.world_size <= max_ranks
    experts = number_after(EXPERT_PARALLEL, cfg.megatron_args) is not None
    kinds = [kind for kind in ("tensor", "context") if getattr(cfg.parallel, kind) > 1]
    assert kinds or experts
    assert all(getattr(downscaled.parallel, kind) == 2 for kind in kinds[:1])
    assert number_after(EXPERT_PARALLEL, downscaled.megatron_args) == (2 if experts else None)
    assert downscaled.parallel.sequence_parallel == cfg.parallel.sequence_parallel
    if max_ranks == 8:
        assert downscaled.parallel.pipeline == min(cfg.parallel.pipeline, 2)
        assert downscaled.data_parallel_size == min(cfg.data_parallel_size, 2)
    # auto would select the stock path on a model this small.
    expected, automatic = cfg.overlap.model_dump(), []
    for section in ("tensor", "expert"):
        if expected[section]["method"] == "auto":
            expected[section]["method"] = "p2p"
            automatic.append(f"overlap.{section}.method")
    assert downscaled.overlap.model_dump() == expected
    assert [change.key for change in changes if change.after == "p2p"] == automatic
    removed = {"--group-query-attention", "--num-query-groups"} if downscaled.model.num_query_groups > 1 else set()
    only_with_copies = (
        {"--overlap-grad-reduce", "--overlap-param-gather"} if downscaled.data_parallel_size == 1 else set()
    )
    assert flags(cfg) - flags(downscaled) <= only_with_copies - removed | {"--moe-grouped-gemm"}
    assert flags(downscaled) - flags(cfg) <= {*REHEARSAL_SWITCHES, *CPU_VALUES, "--no-gradient-accumulation-fusion"}
    changed = {"ranks", "model.hidden_size", "launch.device", *(f"parallel.{kind}" for kind in kinds[:1])}
    assert {change.key for change in changes} >= changed


def test_balanced_attention_needs_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_launch_config(CONFIGS / "llama3_8b_cp8_varlen/overlap.yaml")
    with pytest.raises(ConfigError, match="data.path: data/stdlib: .*make one with python scripts/prepare_data.py"):
        downscale(cfg, 4)


def test_every_difference_is_named() -> None:
    file = CONFIGS / "gpt3_175b_tp8_pp16/overlap.yaml"
    cfg = load_launch_config(file, ["train.lr_warmup_iterations=5", "train.save=ckpt", "train.save_interval=9"])
    downscaled, changes = downscale(cfg, 4)
    named = {change.key: (change.before, change.after) for change in changes}
    assert named["data parallel"] == ("2", "1")
    assert named["parallel.pipeline"] == ("16", "2")
    assert named["train.save"] == ("ckpt", "null")
    assert named["train.lr_warmup_iterations"] == ("5", "1")
    unlisted = {"preset", "max_position_embeddings", "workers", "nodes", "ranks_per_node"}
    unlisted |= {"threads_per_rank", "rehearsal"}
    for section in ("model", "parallel", "train", "data", "launch"):
        before, after = getattr(cfg, section).model_dump(), getattr(downscaled, section).model_dump()
        differing = {key for key in before if before[key] != after[key]} - unlisted
        assert {f"{section}.{key}" for key in differing} <= set(named)


def test_the_model_keeps_its_ratios() -> None:
    cfg = load_launch_config(CONFIGS / "llama3_70b_tp4_pp8/overlap.yaml")
    model = downscale(cfg, 4)[0].model
    assert (model.num_layers, model.num_attention_heads, model.num_query_groups) == (2, 8, 2)
    assert model.ffn_hidden_size / model.hidden_size == pytest.approx(28672 / 8192, rel=0.05)
    assert (model.normalization, model.rotary_base) == ("RMSNorm", 500000)


def with_args(*args: str) -> tuple[LaunchConfig, dict[str, str]]:
    cfg = load_launch_config(CONFIGS / "gpt3_175b_tp8_pp8/overlap.yaml", [f"megatron_args={list(args)}"])
    downscaled, changes = downscale(cfg, 4)
    return downscaled, {change.before: change.after for change in changes if change.key == "megatron_args"}


def test_arguments_that_need_a_gpu_are_removed_and_listed() -> None:
    given = ("--fp8-format", "hybrid", "--exit-interval", "3", "--moe-grouped-gemm", "--num-experts=4")
    downscaled, named = with_args(*given)
    assert downscaled.megatron_args == ("--exit-interval", "3", "--num-experts=4")
    assert named == {"--fp8-format hybrid": "removed", "--moe-grouped-gemm": "removed"}


def test_interleaved_stages_are_downscaled_with_their_layers() -> None:
    downscaled, named = with_args("--num-layers-per-virtual-pipeline-stage=4")
    assert downscaled.megatron_args == ("--num-layers-per-virtual-pipeline-stage", "1")
    assert (downscaled.parallel.pipeline, downscaled.model.num_layers) == (2, 4)
    assert named == {
        "--num-layers-per-virtual-pipeline-stage=4": "--num-layers-per-virtual-pipeline-stage 1",
    }


def test_virtual_stages_are_downscaled_with_their_layers() -> None:
    downscaled, _ = with_args("--num-virtual-stages-per-pipeline-rank", "6")
    assert downscaled.megatron_args == ("--num-virtual-stages-per-pipeline-rank", "2")
    assert downscaled.model.num_layers == 4


@pytest.mark.parametrize(
    "given",
    [
        "--moe-layer-freq ([0]*3+[1]*93)",
        "--no-rope-freq=[0,1]*48",
        "--decoder-first-pipeline-num-layers 5",
        "--decoder-last-pipeline-num-layers=5",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--pipeline-model-parallel-layout Et*12|L",
    ],
)
def test_arguments_that_count_layers_are_removed_and_listed(given: str) -> None:
    downscaled, named = with_args(*given.split(" "))
    assert downscaled.megatron_args == ()
    assert named == {given: "removed"}


def test_a_frequency_of_layers_is_kept() -> None:
    downscaled, named = with_args("--moe-layer-freq", "2")
    assert downscaled.megatron_args == ("--moe-layer-freq", "2")
    assert not named


def test_experts_are_downscaled() -> None:
    cfg = load_launch_config(CONFIGS / "mixtral_8x7b_tp4_ep8/overlap.yaml")
    downscaled, changes = downscale(cfg, 2)
    args = list(downscaled.megatron_args)
    assert args[args.index("--expert-model-parallel-size") + 1] == "2"
    assert args[args.index("--num-experts") + 1] == "8"
    # auto would select the stock path in three steps.
    assert downscaled.overlap.expert.method == "p2p"
    assert "overlap.expert.method" in [change.key for change in changes]


@needs_te
def test_fp16_is_replaced_and_transformer_engine_is_kept() -> None:
    overrides = ["train.transformer_impl=transformer_engine", "train.precision=fp16", "overlap.tensor.method=none"]
    overrides += ["parallel.tensor=4", "parallel.context=2", "launch.entry=pretrain_gpt.py"]
    downscaled, changes = downscale(load_launch_config(CONFIGS / "gpt3_1.3b_tp8/overlap.yaml", overrides), 2)
    named = {change.key: (change.before, change.after) for change in changes}
    assert downscaled.train.transformer_impl == "transformer_engine"
    assert named["train.precision"] == ("fp16", "bf16")
    assert named["parallel.context"] == ("2", "1")
    assert downscaled.train.precision == "bf16"


def test_te_layers_need_transformer_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MEGATRON_OVERLAP_TE", str(tmp_path))
    config = str(CONFIGS / "llama3_8b_tp8/overlap.yaml")
    assert cli.main(["launch", config, "--rehearse", "train.transformer_impl=transformer_engine"]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert "train.transformer_impl: transformer_engine: TransformerEngine is not installed" in shown
    assert "bash scripts/setup.sh te" in shown


def downscaled_tiny(precision: str = "fp32") -> LaunchConfig:
    return downscale(load_launch_config(CONFIGS / "llama3_8b_tp8/overlap.yaml", [f"train.precision={precision}"]), 2)[0]


STOCK = RunRecord((1, 2), (1.0, 1.0), (8.0, 7.9), (3.0, 3.1), None, {}, None)
ON = PluginReport(True, "", 24, 100, ())


@pytest.mark.parametrize(
    ("changed", "message"),
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
def test_failures_of_a_rehearsal(changed: dict[str, Any], message: str | None) -> None:
    overlapped = dataclasses.replace(STOCK, **{"report": ON, **changed})
    failures = Rehearsal(STOCK, overlapped, downscaled_tiny()).failures
    assert [message in failure for failure in failures] == ([True] if message else [])


def test_experts_without_overlapped_calls_fail() -> None:
    downscaled = downscale(load_launch_config(CONFIGS / "qwen3_30b_a3b_ep16/overlap.yaml"), 2)[0]
    idle = dataclasses.replace(STOCK, report=dataclasses.replace(ON, overlapped_calls=0))
    assert Rehearsal(STOCK, idle, downscaled).failures == ["overlap.expert is on, but no call was overlapped"]


def test_nan_in_both_runs_fails() -> None:
    broken = dataclasses.replace(STOCK, losses=(math.nan, math.nan), report=ON)
    assert len(Rehearsal(broken, broken, downscaled_tiny()).failures) == 2


@pytest.fixture
def forked_ranks(forked_python: ForkedPython, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a rehearsal are forks."""
    monkeypatch.setattr(sys, "executable", forked_python.executable)


LOCAL = ["train.transformer_impl=local", "megatron_args=[--no-persist-layer-norm]"]


@pytest.mark.usefixtures("forked_ranks")
def test_local_layers_are_refused_as_on_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "llama3_8b_tp8/overlap.yaml"
    argv = ["launch", str(config), "--rehearse", "--rehearse-ranks", "2", "--run-dir", str(tmp_path)]
    assert cli.main([*argv, *LOCAL]) == 1
    shown = capsys.readouterr()
    assert "AssertionError: sequence parallel not supported by torch LayerNorm" in shown.err, shown.err
    assert "a GPU refuses it too" in shown.err
    assert "set train.transformer_impl=transformer_engine" in shown.err
    assert "gloo in place of NCCL" in shown.out
    assert "which local layers build" not in shown.out


def test_local_layers_for_the_cpu_are_not_refused() -> None:
    cfg = load_launch_config(CONFIGS / "llama3_8b_tp8/overlap.yaml", LOCAL)
    assert downscale(cfg, 2)[0].launch.rehearsal
    on_cpu = cfg.model_copy(update={"launch": cfg.launch.model_copy(update={"device": "cpu"})})
    assert not downscale(on_cpu, 2)[0].launch.rehearsal


@pytest.mark.usefixtures("forked_ranks")
def test_arguments_that_megatron_refuses_are_found_before_a_rehearsal_removes_them(tmp_path: Path) -> None:
    overrides = [LOCAL[0], "megatron_args=[--delay-wgrad-compute]"]
    cfg = load_launch_config(CONFIGS / "llama3_8b_tp8/overlap.yaml", overrides)
    downscaled, _ = downscale(cfg, 2)
    assert "--delay-wgrad-compute" not in downscaled.megatron_args
    with pytest.raises(RunError, match="wgrad"):
        rehearse(cfg, downscaled, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["arguments"]


@needs_te
@pytest.mark.usefixtures("forked_ranks")
def test_a_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The config for eight GPUs runs twice on two CPU ranks, with its TransformerEngine layers."""
    config = CONFIGS / "llama3_8b_tp8/overlap.yaml"
    argv = ["launch", str(config), "--rehearse", "--rehearse-ranks", "2", "--run-dir", str(tmp_path)]
    overrides = ["train.precision=fp32", "train.transformer_impl=transformer_engine"]
    assert cli.main([*argv, *overrides]) == 0, capsys.readouterr().err
    output = capsys.readouterr().out
    assert "rehearsal passed" in output
    assert "parallel.tensor" in output
    runs = sorted(path.name for path in tmp_path.iterdir())
    log = (tmp_path / "llama3_8b_tp8_overlap_rehearsal" / "logs" / "rank0.log").read_text()
    assert re.search(r"transformer_impl \.+ transformer_engine", log), log
    assert runs == ["arguments", "llama3_8b_tp8_overlap_rehearsal", "llama3_8b_tp8_overlap_rehearsal_baseline"]


@needs_te
@pytest.mark.long
@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(("file", "overlaps"), [("overlap", True), ("1f1b", False)])
def test_a_rehearsal_of_experts(file: str, overlaps: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the plugin, and with two micro-batches overlapped by Megatron."""
    config = CONFIGS / f"qwen3_30b_a3b_ep16/{file}.yaml"
    argv = ["launch", str(config), "--rehearse", "--rehearse-ranks", "2", "--run-dir", str(tmp_path)]
    assert cli.main(argv) == 0, capsys.readouterr().err
    (calls,) = re.findall(r"rehearsal passed: (\d+) calls overlapped", capsys.readouterr().out)
    assert (int(calls) > 0) == overlaps


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--rehearse-ranks", "2"], "command line: launch --rehearse-ranks: 2: needs --rehearse"),
        (["--rehearse", "--rehearse-ranks", "0"], "command line: launch --rehearse-ranks: 0"),
        (["--rehearse", "--rendezvous", "a:1"], "command line: launch --rendezvous: a:1: a rehearsal runs on"),
        (["--dry-run", "--rendezvous", "a:1"], "{config}: launch.nodes: 1: --rendezvous a:1 has no effect"),
        (["--emit-slurm", "--dry-run"], "command line: launch --dry-run: true: has no effect with --emit-slurm"),
        (["--emit-slurm", "--run-dir", "x"], "command line: launch --run-dir: x: has no effect with --emit-slurm"),
        (["--emit-slurm", "--rendezvous", "a:1"], "command line: launch --rendezvous: a:1: has no effect"),
        (["--emit-slurm", "--rehearse"], "command line: launch --rehearse: true: has no effect with --emit-slurm"),
        (["--emit-slurm", "--rehearse-ranks", "2"], "command line: launch --rehearse-ranks: 2: has no effect"),
        (["--rehearse", "parallel.tensor=3"], "{base}: launch.ranks_per_node: 8: 8 ranks cannot"),
    ],
)
def test_a_wrong_request_prints_one_line(argv: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = CONFIGS / "llama3_8b_tp8/overlap.yaml"
    assert cli.main(["launch", str(config), *argv]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line.format(config=config, base=CONFIGS.parent / "base" / "gpus.yaml")), shown


def test_a_dry_run_of_a_rehearsal_prints_the_plan_and_starts_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    argv = ["launch", str(CONFIGS.parent / "cpu/llama_tp2/overlap.yaml"), "--rehearse", "--dry-run"]
    assert cli.main([*argv, "--run-dir", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "model.hidden_size" in printed
    assert "--train-iters 3" in printed
    assert not folder.exists()
