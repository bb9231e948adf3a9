"""Context parallelism of Megatron's local layers, which stock Megatron refuses: one layer, and whole trainings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.adapters.megatron_runs import SCRIPTS, TP2_SP, assert_equal_training, train
from tests.adapters.ulysses import core_attention_workers as workers
from tests.helpers.world import World, assert_same

RANKS = 4
GPT = SCRIPTS / "pretrain_gpt.py"
LLAMA = SCRIPTS / "pretrain_llama.py"
CP2 = ("--context-parallel-size", "2")
GQA = ("--group-query-attention", "--num-query-groups", "2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Separate workers, because Megatron's classes and groups cannot be unloaded."""
    processes = World(answer_s=120, adapted=True)
    processes.run(RANKS, workers.start)
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("options", "op"),
    [
        ({}, "ulysses_layer"),
        ({"main_grad": True}, "ulysses_layer"),
        ({"fuse": False}, "ulysses"),
        ({"recompute": True}, "ulysses"),
        ({"apply_query_key_layer_scaling": True}, "ulysses_layer"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_layer_equals_the_textbook(ranks: World, options: dict[str, Any], op: str) -> None:
    assert ranks.run(RANKS, workers.compare_with_textbook, **options) == [[op]] * RANKS


def test_a_layer_is_released(ranks: World) -> None:
    assert ranks.run(RANKS, workers.layer_is_released) == [True] * RANKS


def test_unsupported_options_are_named(ranks: World) -> None:
    texts = ranks.run(RANKS, workers.error_messages)
    assert_same(texts)
    stock, *messages = texts[0]
    assert stock.startswith("Context parallelism is only supported by TEDotProductAttention!")
    assert [text.split(": ")[1] for text in messages] == [
        "--attention-dropout 0.1",
        "--window-size (4, 0)",
        "--num-attention-heads 3",
        "packed sequences",
        "attention bias",
        "key/value cache",
    ]


@pytest.fixture
def plugin(tmp_path: Path) -> tuple[str, str]:
    file = tmp_path / "overlap.yaml"
    overlap = {"tensor": {"method": "p2p"}, "ulysses": {"method": "p2p"}, "strict": True}
    file.write_text(yaml.safe_dump({"overlap": overlap}))
    return "--overlap-config", str(file)


def assert_counted(run_dir: Path, op: str, *, ranks: int, layers: int = 2) -> None:
    """The report counts attention of every layer, forward and backward, on every rank."""
    for rank in range(ranks):
        report = json.loads((run_dir / f"report-rank{rank}.json").read_text())
        calls = {m["direction"]: m for m in report["modules"] if m["kind"] == "attention"}
        assert {m["op"] for m in calls.values()} == {op}
        assert set(calls) == {"forward", "dgrad", *(["wgrad"] if op == "ulysses_layer" else [])}
        assert calls["forward"]["overlapped"] == calls["dgrad"]["overlapped"] > layers
        assert calls["forward"]["bytes"] > 0
        assert report["totals"]["fallbacks"] == 0


@pytest.mark.long
def test_llama_with_tensor_and_context_ranks(plugin: tuple[str, str], tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", LLAMA, 1, *GQA)
    overlapped = train(tmp_path / "tp2up2", LLAMA, 4, *GQA, *CP2, *TP2_SP, "--overlap-grad-reduce", *plugin, off=False)
    assert_equal_training(overlapped, stock)
    assert_counted(tmp_path / "tp2up2", "ulysses", ranks=4)


@pytest.mark.long
def test_gpt_with_overlapped_parameter_gather(plugin: tuple[str, str], tmp_path: Path) -> None:
    """The fused layer with the distributed optimizer and several micro-batches."""
    options = shlex.split("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather")
    stock = train(tmp_path / "stock", GPT, 1, "--micro-batch-size", "1")
    overlapped = train(tmp_path / "up2", GPT, 2, *CP2, *options, "--micro-batch-size", "1", *plugin, off=False)
    assert_equal_training(overlapped, stock)
    assert_counted(tmp_path / "up2", "ulysses_layer", ranks=2)
