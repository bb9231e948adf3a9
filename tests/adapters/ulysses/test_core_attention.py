"""Context parallelism of Megatron's local and TransformerEngine layers: one layer, models, and whole trainings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.adapters.conftest import RANKS
from tests.adapters.megatron_runs import SCRIPTS, TE_LAYERS, TP2_SP, assert_equal_training, train
from tests.adapters.tensor_parallel.transformer_engine_models import Model
from tests.adapters.ulysses import core_attention_workers as workers
from tests.helpers.te import needs_te
from tests.helpers.world import World, assert_same

GPT = SCRIPTS / "pretrain_gpt.py"
LLAMA = SCRIPTS / "pretrain_llama.py"
CP2 = ("--context-parallel-size", "2")
GQA = ("--group-query-attention", "--num-query-groups", "2")


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Separate workers, because Megatron's classes and groups cannot be unloaded."""
    processes = World(RANKS, answer_s=120, adapted=True)
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
        ({"hook": "linear_qkv"}, "ulysses"),
        ({"hook": "core_attention"}, "ulysses"),
        ({"replaced": "linear_qkv class"}, "ulysses"),
        ({"replaced": "linear_proj forward"}, "ulysses"),
        ({"replaced": "core_attention forward"}, "ulysses"),
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


BF16 = torch.bfloat16
TE_MODELS: dict[str, tuple[Model, dict[str, Any], dict[str, int]]] = {
    "llama": (Model("llama"), {}, {"ulysses_layer": 2}),
    "llama bf16": (Model("llama", BF16), {}, {"ulysses_layer": 2}),
    "main_grad": (Model("llama"), {"main_grad": True}, {"ulysses_layer": 2}),
    "biases": (Model("gpt", config={"qk_layernorm": False}), {}, {"ulysses_layer": 2}),
    "window": (Model("llama", config={"window_size": (5, 0)}), {}, {"ulysses_layer": 2}),
    "norms of queries and keys": (Model("gpt", config={"window_size": (5, 0)}), {}, {"ulysses": 2}),
    "few key/value heads": (Model("llama", config={"num_query_groups": 1}), {}, {"ulysses": 2}),
    "tensor ranks": (Model("llama"), {"tensor": 2}, {"ulysses": 2, "ag_gemm": 5, "gemm_rs": 4}),
    "tensor ranks bf16": (Model("llama", BF16), {"tensor": 2}, {"ulysses": 2, "ag_gemm": 5, "gemm_rs": 4}),
}


@needs_te
@pytest.mark.parametrize("name", TE_MODELS)
def test_a_transformer_engine_model_equals_stock_with_one_context_rank(
    te_ranks: World, four_te_ranks: World, name: str
) -> None:
    case, options, calls = TE_MODELS[name]
    world, num_ranks = (four_te_ranks, 4) if "tensor" in options else (te_ranks, RANKS)
    for found, reasons in world.run(num_ranks, workers.te_model_against_stock, case, **options):
        assert reasons == []
        assert found == calls


@needs_te
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1: use 0 with Ulysses"),
        (
            {"num_attention_heads": 3, "kv_channels": 4},
            "--num-attention-heads 3: must be a multiple of tensor x context parallel size = 1 x 2",
        ),
        ({"softmax_type": "off-by-one"}, "--softmax-type off-by-one: use vanilla with Ulysses"),
        ({"log_max_attention_logit": True}, "--qk-clip or --log-max-attention-logit: not with Ulysses"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_unsupported_transformer_engine_layer_is_counted(
    te_ranks: World, changes: dict[str, Any], reason: str
) -> None:
    """On the CPU it is an error with that reason: TransformerEngine's context parallelism needs a GPU."""
    for text, counted in te_ranks.run(RANKS, workers.te_fallbacks, changes, False):
        assert (
            text == f"UlyssesError: overlap.ulysses: {reason}. TransformerEngine's own context parallelism needs a GPU"
        )
        assert counted == [reason]
    for text, _ in te_ranks.run(RANKS, workers.te_fallbacks, changes, True):
        assert text.startswith("FallbackError: attention ")
        assert reason in text


@needs_te
def test_unsupported_calls_run_the_context_parallelism_of_transformer_engine(te_ranks: World) -> None:
    for reasons in te_ranks.run(RANKS, workers.te_fallback_calls):
        assert [reason.split(":")[0] for reason in reasons] == [
            "attention bias",
            "attention mask AttnMaskType.no_mask",
            "key/value cache",
            "keys and values of different head sizes",
            "packed sequences",
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


@needs_te
@pytest.mark.long
def test_gpt_of_transformer_engine_layers(plugin: tuple[str, str], tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", GPT, 1, *TE_LAYERS)
    overlapped = train(tmp_path / "up2", GPT, 2, *TE_LAYERS, *CP2, "--overlap-grad-reduce", *plugin, off=False)
    assert_equal_training(overlapped, stock)
    assert_counted(tmp_path / "up2", "ulysses_layer", ranks=2)


@needs_te
@pytest.mark.long
def test_llama_of_transformer_engine_layers_with_tensor_and_context_ranks(
    plugin: tuple[str, str], tmp_path: Path
) -> None:
    options = (*GQA, *TE_LAYERS, "--overlap-grad-reduce")
    stock = train(tmp_path / "stock", LLAMA, 1, *options)
    overlapped = train(tmp_path / "tp2up2", LLAMA, 4, *options, *CP2, *TP2_SP, *plugin, off=False)
    assert_equal_training(overlapped, stock)
    assert_counted(tmp_path / "tp2up2", "ulysses", ranks=4)


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
