"""Whole trainings with and without the plugin: every loss and grad-norm. `scripts/equality.py` has the full matrix.

The daily run has others: `tests/tools/launch/test_rehearsal.py` trains TransformerEngine's layers, and
`tests/tools/compare/test_command.py` local layers.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.adapters.megatron_runs import SCRIPTS, TE_LAYERS, TP2_SP, assert_equal_training, train
from tests.helpers.te import needs_te

GPT = SCRIPTS / "pretrain_gpt.py"
LLAMA = SCRIPTS / "pretrain_llama.py"
FUSED = Path(__file__).with_name("fused_wgrad.py")
SLOW = Path(__file__).with_name("slow_messages.py")
GQA = ("--group-query-attention", "--num-query-groups", "2")
SHARDED = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000")
BF16_FACTOR = 2.0  # see docs/numerics.md

Rows = dict[int, dict[str, Any]]


@pytest.fixture
def plugin(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "overlap.yaml"
    file.write_text(yaml.safe_dump({"overlap": {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "strict": True}}))
    return "--overlap-config", str(file)


def tensor_calls(*ops: str) -> set[tuple[str, str]]:
    return {(op, way) for op in ops for way in ("forward", "dgrad", "wgrad")}


TENSOR = tensor_calls("ag_gemm", "gemm_rs")
DATA = {("reduce_scatter", "wgrad"), ("all_gather", "forward"), ("step of a bucket, then its gather", "forward")}


def assert_overlapped(run_dir: Path, *, ranks: int, expected: set[tuple[str, str]] = TENSOR) -> None:
    """Every rank overlapped all of the expected calls and no others, without a fallback."""
    for rank in range(ranks):
        report = json.loads((run_dir / f"report-rank{rank}.json").read_text())
        done = {(m["op"], m["direction"]) for m in report["modules"] if m["overlapped"]}
        assert done == expected
        assert report["totals"]["fallbacks"] == 0
        assert report["totals"]["bytes"] > 0


def largest_deviation(rows: Rows, exact: Rows, name: str) -> float:
    assert sorted(rows) == sorted(exact) == [1, 2, 3, 4]
    return max(abs(rows[i][name] - exact[i][name]) / abs(exact[i][name]) for i in rows)


@pytest.mark.long
def test_llama(plugin: tuple[str, str], tmp_path: Path) -> None:
    layout = (*GQA, *TP2_SP)
    exact = train(tmp_path / "stock", LLAMA, 2, *layout)
    assert_equal_training(train(tmp_path / "mine", LLAMA, 2, *layout, *plugin, off=False), exact)
    assert_overlapped(tmp_path / "mine", ranks=2)


@needs_te
def test_llama_of_te_layers(plugin: tuple[str, str], tmp_path: Path) -> None:
    layout = (*GQA, *TP2_SP, *TE_LAYERS)
    exact = train(tmp_path / "stock", LLAMA, 2, *layout)
    assert_equal_training(train(tmp_path / "mine", LLAMA, 2, *layout, *plugin, off=False), exact)
    assert_overlapped(tmp_path / "mine", ranks=2)


@needs_te
@pytest.mark.long
def test_batch_overlap_of_te_layers(tmp_path: Path) -> None:
    file = tmp_path / "overlap.yaml"
    file.write_text(yaml.safe_dump({"overlap": {"tensor": {"method": "p2p", "split": "batch"}, "strict": True}}))
    layout = (*GQA, "--tensor-model-parallel-size", "2", "--untie-embeddings-and-output-weights", *TE_LAYERS)
    mine = train(tmp_path / "mine", LLAMA, 2, *layout, "--overlap-config", str(file), off=False)
    assert_equal_training(mine, train(tmp_path / "stock", LLAMA, 2, *layout))
    assert_overlapped(tmp_path / "mine", ranks=2, expected=tensor_calls("copy_gemm", "gemm_ar"))
    report = json.loads((tmp_path / "mine" / "report-rank0.json").read_text())
    columns = [m["overlapped"] for m in report["modules"] if (m["op"], m["direction"]) == ("copy_gemm", "forward")]
    # In 4 steps of 2 micro-batches: two for each part in each of 2 layers, and the output layer.
    assert sum(columns) == 4 * 2 * (2 * 2 * 2 + 1)


@needs_te
@pytest.mark.long
def test_te_layers_with_data_parallel_ranks_then_resumed_without_the_plugin(
    plugin: tuple[str, str], tmp_path: Path
) -> None:
    """The optimizer is FusedAdam, whose step number belongs to a parameter group; the checkpoint holds it."""
    layout = (*TP2_SP, *SHARDED, "--micro-batch-size", "1", *TE_LAYERS)
    saved = tmp_path / "saved"
    stock = train(tmp_path / "stock", GPT, 4, *layout)
    mine = train(tmp_path / "mine", GPT, 4, *layout, "--save", str(saved), "--save-interval", "2", *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_overlapped(tmp_path / "mine", ranks=4, expected=TENSOR | DATA)

    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "off", GPT, 4, *layout, "--load", str(saved))
    assert sorted(resumed) == [3, 4]
    assert_equal_training(resumed, stock)


@pytest.mark.long
def test_llama_in_bf16(plugin: tuple[str, str], tmp_path: Path) -> None:
    layout = (*GQA, *TP2_SP)
    exact = train(tmp_path / "stock", LLAMA, 2, *layout)
    stock = train(tmp_path / "stock16", LLAMA, 2, *layout, "--bf16")
    mine = train(tmp_path / "mine16", LLAMA, 2, *layout, "--bf16", *plugin, off=False)
    assert_overlapped(tmp_path / "mine16", ranks=2)
    for name in ("loss", "grad_norm"):
        own = largest_deviation(stock, exact, name)
        assert own > 1e-6, "stock in bf16 is fp32"
        assert largest_deviation(mine, exact, name) <= BF16_FACTOR * own


@pytest.mark.long
def test_gpt_with_data_parallel_ranks(plugin: tuple[str, str], tmp_path: Path) -> None:
    layout = (*TP2_SP, *SHARDED, "--micro-batch-size", "1")
    mine = train(tmp_path / "mine", GPT, 4, *layout, *plugin, off=False)
    assert_equal_training(mine, train(tmp_path / "stock", GPT, 4, *layout))
    assert_overlapped(tmp_path / "mine", ranks=4, expected=TENSOR | DATA)


@pytest.mark.long
def test_data_parallel_with_evaluation_then_resumed_without_the_plugin(plugin: tuple[str, str], tmp_path: Path) -> None:
    """Two micro-batches a step. All-gathers of parameters are in flight when evaluation and the checkpoint start."""
    evaluate = shlex.split("--split 90,10,0 --eval-interval 2 --eval-iters 1")
    layout = (*SHARDED, "--micro-batch-size", "1", *evaluate)
    saved = tmp_path / "saved"
    stock = train(tmp_path / "stock", GPT, 2, *layout)
    mine = train(tmp_path / "mine", GPT, 2, *layout, "--save", str(saved), "--save-interval", "2", *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_overlapped(tmp_path / "mine", ranks=2, expected=DATA)

    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "off", GPT, 2, *layout, "--load", str(saved))
    assert sorted(resumed) == [3, 4]
    assert_equal_training(resumed, stock)


@pytest.mark.long
def test_gradients_added_inside_the_gemm_then_resumed_without_the_plugin(
    plugin: tuple[str, str], tmp_path: Path
) -> None:
    """Into Megatron's fp32 buffer, with several micro-batches and Megatron's hooks."""
    layout = (*TP2_SP, "--use-distributed-optimizer", "--overlap-grad-reduce", "--micro-batch-size", "1")
    saved = tmp_path / "saved"
    save = ("--save", str(saved), "--save-interval", "2")
    stock = train(tmp_path / "stock", GPT, 2, *layout)
    mine = train(tmp_path / "mine", FUSED, 2, *layout, *save, *plugin, off=False)
    assert_equal_training(mine, stock)
    assert_overlapped(tmp_path / "mine", ranks=2)

    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "off", GPT, 2, *layout, "--load", str(saved))
    assert sorted(resumed) == [3, 4]
    assert_equal_training(resumed, stock)


@pytest.mark.long
def test_without_sequence_parallelism(plugin: tuple[str, str], tmp_path: Path) -> None:
    layout = (*GQA, "--tensor-model-parallel-size", "2", "--untie-embeddings-and-output-weights")
    mine = train(tmp_path / "mine", LLAMA, 2, *layout, *plugin, off=False)
    assert_equal_training(mine, train(tmp_path / "stock", LLAMA, 2, *layout))
    assert_overlapped(tmp_path / "mine", ranks=2, expected=tensor_calls("copy_gemm", "gemm_ar"))
    report = json.loads((tmp_path / "mine" / "report-rank0.json").read_text())
    columns = [m["overlapped"] for m in report["modules"] if (m["op"], m["direction"]) == ("copy_gemm", "dgrad")]
    # In 4 steps of 2 micro-batches: two in each of 2 layers, and the output layer.
    assert sum(columns) == 4 * 2 * (2 * 2 + 1)
    assert set(report["not_overlapped"]) == {"VocabParallelEmbedding", "VocabParallelCrossEntropy"}


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["no-sp", "sp"])
@pytest.mark.parametrize("accumulate", [GPT, FUSED], ids=["autograd", "main_grad"])
def test_batch_overlap_with_data_parallel_ranks(accumulate: Path, sequence_parallel: bool, tmp_path: Path) -> None:
    """Megatron's data-parallel hooks run once for each weight, with the sum over both parts of the batch."""
    file = tmp_path / "overlap.yaml"
    file.write_text(yaml.safe_dump({"overlap": {"tensor": {"method": "p2p", "split": "batch"}, "strict": True}}))
    layout = ("--tensor-model-parallel-size", "2", *SHARDED, "--micro-batch-size", "2", "--global-batch-size", "8")
    layout += ("--sequence-parallel",) if sequence_parallel else ()
    stock = train(tmp_path / "stock", GPT, 4, *layout)
    mine = train(tmp_path / "mine", accumulate, 4, *layout, "--overlap-config", str(file), off=False)
    assert_equal_training(mine, stock)
    expected = TENSOR if sequence_parallel else tensor_calls("copy_gemm", "gemm_ar")
    assert_overlapped(tmp_path / "mine", ranks=4, expected=expected | DATA)


@pytest.mark.long
def test_autotuning_changes_no_loss_and_selects_the_stock_path_where_messages_are_slow(tmp_path: Path) -> None:
    """Every candidate is timed in the first steps, so that layers switch from call to call; stock is selected."""
    file = tmp_path / "auto.yaml"
    tensor = {"method": "auto", "autotune_cache": str(tmp_path / "autotune")}
    file.write_text(yaml.safe_dump({"overlap": {"tensor": tensor, "strict": True}}))
    layout = (*TP2_SP, "--micro-batch-size", "1", "--train-iters", "40")
    mine = train(tmp_path / "mine", SLOW, 2, *layout, "--overlap-config", str(file), off=False)
    assert len(mine) == 40
    assert_equal_training(mine, train(tmp_path / "stock", GPT, 2, *layout))
    reports = [json.loads((tmp_path / "mine" / f"report-rank{rank}.json").read_text()) for rank in range(2)]
    assert reports[0]["autotuning"] == reports[1]["autotuning"]
    lines = reports[0]["autotuning"]
    assert {line["op"] for line in lines} == {"ag_gemm", "gemm_rs", "block"}
    for line in (line for line in lines if line["op"] != "block"):
        assert line["method"] == "stock"
        assert line["reason"].startswith("none is faster: p2p")
        assert line["ms"] == line["stock_ms"] > 0
    assert reports[0]["totals"]["overlapped"] > 0, "p2p was timed"
    assert reports[0]["totals"]["fallbacks"] == 0, "a selected stock path is no fallback"
    assert sum(module.get("stock_selected", 0) for module in reports[0]["modules"]) > 0
    assert len(list((tmp_path / "autotune").glob("*.json"))) == len(lines)
