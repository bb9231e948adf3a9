"""Whole trainings under context parallelism, which stock Megatron's local layers refuse, against one context rank."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.adapters.megatron_runs import NO_GPU, SCRIPTS, TINY, TP2_SP, assert_equal_training, start_ranks, train

GPT = SCRIPTS / "pretrain_gpt.py"
LLAMA = SCRIPTS / "pretrain_llama.py"
CP2 = ("--context-parallel-size", "2")
GQA = ("--group-query-attention", "--num-query-groups", "2")


@pytest.fixture
def plugin(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "overlap.yaml"
    overlap = {"tensor": {"method": "p2p"}, "ulysses": {"method": "p2p"}, "strict": True}
    file.write_text(yaml.safe_dump({"overlap": overlap}))
    return "--overlap-config", str(file)


def assert_counted(run_dir: Path, op: str, *, ranks: int, layers: int = 2) -> None:
    """Every layer's attention, both ways, on every rank."""
    for rank in range(ranks):
        report = json.loads((run_dir / f"report-rank{rank}.json").read_text())
        calls = {m["direction"]: m for m in report["modules"] if m["kind"] == "attention"}
        assert {m["op"] for m in calls.values()} == {op}
        assert set(calls) == {"forward", "dgrad", *(["wgrad"] if op == "ulysses_layer" else [])}
        assert calls["forward"]["overlapped"] == calls["dgrad"]["overlapped"] > layers
        assert calls["forward"]["bytes"] > 0
        assert report["totals"]["fallbacks"] == 0


def test_llama_with_tensor_and_context_ranks(plugin: tuple[str, str], tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", LLAMA, 1, *GQA)
    mine = train(tmp_path / "up2", LLAMA, 2, *GQA, *CP2, *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_counted(tmp_path / "up2", "ulysses", ranks=2)
    mine = train(tmp_path / "tp2up2", LLAMA, 4, *GQA, *CP2, *TP2_SP, *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_counted(tmp_path / "tp2up2", "ulysses", ranks=4)


def test_gpt_with_data_parallel_ranks(plugin: tuple[str, str], tmp_path: Path) -> None:
    """The whole layer by head groups; parameters are awaited where its projections would have been called."""
    options = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    options += ["--micro-batch-size", "1"]
    stock = train(tmp_path / "stock", GPT, 1, "--micro-batch-size", "1")
    mine = train(tmp_path / "dp2up2", GPT, 4, *CP2, *options, *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_counted(tmp_path / "dp2up2", "ulysses_layer", ranks=4)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--attention-dropout", "0.1"], "--attention-dropout 0.1: use 0"),
        (["--window-size", "4,0"], "--window-size (4, 0): sliding windows"),
        (["--num-attention-heads", "1", "--kv-channels", "8"], "--num-attention-heads 1: must be a multiple"),
        (["--reset-attention-mask"], "--reset-attention-mask: documents"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    plugin: tuple[str, str], tmp_path: Path, flags: list[str], says: str
) -> None:
    argv = [str(GPT), *NO_GPU, *TINY, *CP2, *flags, *plugin, "--overlap-device", "cpu"]
    done = start_ranks(2, argv)
    assert all(each.returncode != 0 for each in done)
    assert f"UlyssesError: overlap.ulysses: {says}" in "".join(each.stdout for each in done)
