"""TransformerEngine's linear layers and models of them are overlapped, and equal to the stock path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_overlap.config import ConfigError, load_launch_config
from megatron_overlap.config.megatron_args import TE_OVERLAP
from tests.adapters.conftest import RANKS
from tests.adapters.megatron_runs import PLUGIN_OFF, start_ranks
from tests.adapters.tensor_parallel import autotune_workers
from tests.adapters.tensor_parallel import transformer_engine_workers as cases
from tests.adapters.tensor_parallel.transformer_engine_models import Model, model_against_stock
from tests.adapters.tensor_parallel.transformer_engine_workers import Layer
from tests.helpers.releases import ROOT
from tests.helpers.te import needs_te
from tests.helpers.world import World

pytestmark = needs_te
BF16 = torch.bfloat16
DTYPES = {"fp32": torch.float32, "bf16": BF16}
BATCH_OVERLAP_IN_BF16 = [("sp", "gpt"), ("no-sp", "llama")]
QUERY_SPLIT = {"attention": "query_split"}
LLAMA_AND_GPT = pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param("llama", torch.float32, id="llama-fp32"),
        pytest.param("gpt", BF16, id="gpt-bf16"),
        pytest.param("llama", BF16, id="llama-bf16", marks=pytest.mark.long),
        pytest.param("gpt", torch.float32, id="gpt-fp32", marks=pytest.mark.long),
    ],
)
# A model without sequence parallelism whose layers run in batch overlap.
SPLIT: dict[str, Any] = {"config": {"sequence_parallel": False}, "tensor": {"split": "batch"}}


def overlapped(kind: str, sequence_parallel: bool, calls: int = 1, wgrad: int = 1) -> list[tuple[str, str, int]]:
    """The counts of a layer whose every pass is overlapped."""
    ops = ("gemm_ar", "gemm_rs") if kind == "row" else ("copy_gemm", "ag_gemm")
    op = ops[sequence_parallel]
    counts = [(op, "dgrad", calls), (op, "forward", calls), (op, "wgrad", wgrad * calls)]
    return [count for count in counts if count[2]]


# Weight gradients in bf16 are in the tests below.
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(BF16, marks=pytest.mark.long)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_equal_to_stock(te_ranks: World, kind: str, sequence_parallel: bool, dtype: torch.dtype) -> None:
    case = Layer(kind, dtype, sequence_parallel=sequence_parallel)
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, case):
        assert calls == overlapped(kind, sequence_parallel)


@pytest.mark.parametrize("bias", ["none", "returned"])
@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_a_bias_is_added_once_or_returned(te_ranks: World, kind: str, sequence_parallel: bool, bias: str) -> None:
    case = Layer(kind, bias=bias != "none", skip_bias_add=bias == "returned", sequence_parallel=sequence_parallel)
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, case):
        assert calls == overlapped(kind, sequence_parallel)


@pytest.mark.parametrize(
    ("normalization", "dtype", "zero_centered"),
    [
        ("RMSNorm", torch.float32, True),
        ("RMSNorm", BF16, False),
        ("LayerNorm", torch.float32, False),
        ("LayerNorm", BF16, True),
    ],
)
def test_every_norm(te_ranks: World, normalization: str, dtype: torch.dtype, zero_centered: bool) -> None:
    case = Layer("norm", dtype, normalization=normalization, zero_centered=zero_centered)
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, case):
        assert calls == overlapped("norm", True)


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_weight_gradients_of_two_microbatches_are_added_to_main_grad(
    te_ranks: World, kind: str, sequence_parallel: bool
) -> None:
    case = Layer(kind, BF16, fused=True, microbatches=2, sequence_parallel=sequence_parallel)
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, case):
        assert calls == overlapped(kind, sequence_parallel, 2)


@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_recomputed(te_ranks: World, kind: str) -> None:
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, Layer(kind, recompute=True)):
        assert ("ag_gemm" if kind != "row" else "gemm_rs", "forward", 2) in calls


@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_a_frozen_weight_gets_no_gradient(te_ranks: World, kind: str) -> None:
    for calls, _ in te_ranks.run(RANKS, cases.against_stock, Layer(kind, frozen=True, bias=False)):
        assert calls == overlapped(kind, True, wgrad=0)


@pytest.mark.parametrize("kind", ["column", "row", "norm"])
def test_check_mode_compares_every_pass(te_ranks: World, kind: str) -> None:
    for calls, results in te_ranks.run(RANKS, cases.against_stock, Layer(kind, BF16, fused=True), check=True):
        assert calls == overlapped(kind, True)
        assert {name.split()[-1] for name in results} >= {"y", "dx", "dw"}
        assert all(0 <= share <= 1 for share in results.values())


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("recipe", "a quantization recipe names this layer"),
        ("overwrites", "the weight gradient overwrites main_grad"),
        ("userbuffers", "--tp-comm-overlap: TransformerEngine overlaps communication itself"),
        ("delayed", "deferred weight gradient (--delay-wgrad-compute)"),
        ("odd", "sequence length is not divisible by the tensor-parallel size 2"),
    ],
)
def test_an_unsupported_layer_runs_the_stock_forward(te_ranks: World, what: str, reason: str) -> None:
    for reasons in te_ranks.run(RANKS, cases.falls_back, Layer("row"), what):
        assert reasons == [reason]


@pytest.mark.parametrize("fused", [pytest.param(False, marks=pytest.mark.long), True], ids=["autograd", "main_grad"])
def test_auto_measures_every_candidate_and_lists_a_selection(te_ranks: World, fused: bool) -> None:
    """Every trial is a call of the training, so that it adds to `main_grad` once."""
    answers = te_ranks.run(RANKS, cases.tuned, fused)
    ran, lines = answers[0]
    assert [line["op"] for line in lines] == ["ag_gemm", "gemm_rs"]
    assert all(line["module"].endswith(" main_grad") == fused for line in lines)
    for line in lines:
        assert line["ms"] > 0
        assert line["stock_ms"] > 0, "the stock path is timed with its norm, as the other candidates are"
    for op in ("ag_gemm", "gemm_rs"):
        assert f"{op} stock" in ran
        assert any(each.startswith(f"{op} p2p") for each in ran)


@pytest.mark.parametrize("split_us", [100, pytest.param(300, marks=pytest.mark.long)], ids=["faster", "slower"])
def test_auto_measures_a_block_in_batch_overlap(te_ranks: World, split_us: float) -> None:
    run = te_ranks.run(RANKS, autotune_workers.block, autotune_workers.BlockCase(split_us, te=True))[0]
    layers, block = run.lines
    assert (layers["op"], block["op"]) == ("copy_gemm", "block")
    assert block["method"] == ("batch overlap" if split_us < 200 else "separate layers")
    assert run.split[-6:] == [split_us < 200] * 6


def test_only_layers_that_te_quantizes_run_the_stock_path(te_ranks: World) -> None:
    """The configuration says fp8 for all layers; those of `first_last_layers_bf16` run outside of the fp8 context."""
    reason = "fp8: TransformerEngine quantizes its messages"
    assert te_ranks.run(RANKS, cases.reasons_with_fp8) == [[None, reason, None]] * RANKS


# Overlapped forwards of each model, by operation. A layer has two column- and two row-parallel linears, the output
# layer is column-parallel, and each model has two layers.
MODEL_CALLS = {
    "llama": {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2},
    "gpt": {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2},
    "fused MLP": {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2},
    # It has another kernel for one tensor-parallel rank only.
    "grouped fused MLP": {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2},
    # One more layer, the projection of its input, and a second pass through the output layer.
    "MTP": {"ag_gemm": 3 * 2 + 1 + 2, "gemm_rs": 3 * 2},
    # Two up-projections in place of QKV.
    "MLA": {"ag_gemm": 2 * 3 + 1, "gemm_rs": 2 * 2},
    # The linears of experts do not communicate.
    "experts": {"ag_gemm": 2 * 1 + 1, "gemm_rs": 2 * 1},
    "hybrid": {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2},
    "BERT": {"ag_gemm": 2 * 2, "gemm_rs": 2 * 2},
    # The encoder; a decoder layer has cross attention with one layer for queries, and one for keys and values.
    "T5": {"ag_gemm": 2 * 2 + 2 * 4 + 1, "gemm_rs": 2 * 2 + 2 * 3},
}


@pytest.mark.parametrize("kind", MODEL_CALLS)
def test_models_equal_stock(te_ranks: World, kind: str) -> None:
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, Model(kind)):
        assert reasons == []
        assert calls == MODEL_CALLS[kind]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_models_in_bf16_are_as_near_to_fp32_as_stock(te_ranks: World, kind: str) -> None:
    for calls, _, _ in te_ranks.run(RANKS, model_against_stock, Model(kind, BF16)):
        assert calls == MODEL_CALLS[kind]


@pytest.mark.parametrize(
    ("sequence_parallel", "kind", "dtype"),
    [
        pytest.param(
            layout == "sp",
            kind,
            DTYPES[dtype],
            id=f"{layout}-{kind}-{dtype}",
            # The dtype changes the sums in main_grad, which gpt has, and the messages of each layout.
            marks=pytest.mark.long if dtype == "bf16" and (layout, kind) not in BATCH_OVERLAP_IN_BF16 else (),
        )
        for layout in ("sp", "no-sp")
        for kind in ("llama", "gpt", "fused MLP")
        for dtype in DTYPES
    ],
)
def test_models_in_batch_overlap_equal_stock(
    te_ranks: World, sequence_parallel: bool, kind: str, dtype: torch.dtype
) -> None:
    """Each linear of a layer and the embedding run once for each part of the batch; the output layer is not split."""
    # The gradients of query and key norms nearly cancel: bf16 leaves one digit of them, in stock too.
    config = {"sequence_parallel": sequence_parallel, **({"qk_layernorm": False} if dtype == BF16 else {})}
    case = Model(kind, dtype, fused=kind == "gpt", config=config, tensor=SPLIT["tensor"])
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == []
        column, row = ("ag_gemm", "gemm_rs") if sequence_parallel else ("copy_gemm", "gemm_ar")
        assert calls == {column: 2 * 2 * 2 + 1, row: 2 * 2 * 2, **({"reduce_scatter": 2} if sequence_parallel else {})}


@LLAMA_AND_GPT
def test_models_of_a_split_sequence_equal_stock(te_ranks: World, kind: str, dtype: torch.dtype) -> None:
    config = {"qk_layernorm": False} if dtype == BF16 else {"softmax_scale": 0.3}
    tensor = {"split": "sequence", "split_at": "auto" if kind == "gpt" else 0.7}
    case = Model(kind, dtype, batch=1, fused=kind == "gpt", config=config, tensor=tensor)
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == []
        assert calls == {"ag_gemm": 2 * 2 * 2 + 1, "gemm_rs": 2 * 2 * 2, "reduce_scatter": 2}


@pytest.mark.parametrize("split", ["none", "batch", "sequence"])
@pytest.mark.parametrize(
    "recompute",
    [
        {"recompute_granularity": "selective"},
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    ],
    ids=["selective", "full"],
)
def test_recomputed_models_equal_stock(te_ranks: World, split: str, recompute: dict[str, Any]) -> None:
    """The recomputed pass leaves out the last linear layer of both transformer layers."""
    batch = 1 if split == "sequence" else 2
    case = Model("llama", batch=batch, fused=True, config=recompute, tensor={"split": split})
    full, parts = recompute["recompute_granularity"] == "full", 1 if split == "none" else 2
    forwards = parts * 2 * 2 * (2 if full else 1)
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == []
        embedded = {"reduce_scatter": 2} if split != "none" and not full else {}
        assert calls == {"ag_gemm": forwards + 1, "gemm_rs": forwards - parts * full, **embedded}


@LLAMA_AND_GPT
def test_models_with_query_split_equal_stock(te_ranks: World, kind: str, dtype: torch.dtype) -> None:
    """Flash attention in slices of queries, and the projection of each slice, in place of two modules."""
    config = {"qk_layernorm": False} if dtype == BF16 else {"softmax_scale": 0.3}
    case = Model(kind, dtype, fused=kind == "gpt", config=config, tensor=QUERY_SPLIT)
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == []
        assert calls == {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2, "query_split": 2}


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("llama", {"config": {"window_size": (3, 0)}}, "sliding-window attention"),
        ("llama", {"config": {"softmax_type": "off-by-one"}}, "the softmax has an offset"),
        ("llama", {"config": {"sequence_parallel": False}}, "query split needs --sequence-parallel"),
        ("llama", {"overwrites": "linear_proj"}, "the weight gradient overwrites main_grad"),
        ("BERT", {}, "the attention mask is padding, not causal"),
    ],
    ids=["window", "offset", "plain", "weight", "padding"],
)
def test_an_attention_that_query_split_does_not_support_is_counted(
    te_ranks: World, kind: str, given: dict[str, Any], reason: str
) -> None:
    case = Model(kind, strict=False, tensor=QUERY_SPLIT, **given)
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == [reason]
        assert "query_split" not in calls


@pytest.mark.parametrize("sequence_parallel", [True, False], ids=["sp", "no-sp"])
def test_bf16_layers_of_an_fp8_model_are_overlapped(te_ranks: World, sequence_parallel: bool) -> None:
    """`first_last_layers_bf16`: both layers of the model run outside of the fp8 context."""
    config = {"fp8": "hybrid", "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}
    config |= {"num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 1}
    config["sequence_parallel"] = sequence_parallel
    case = Model("llama", BF16, config=config, tensor=SPLIT["tensor"])
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert sorted(calls.values()) == [2 * 2 * 2, 2 * 2 * 2 + 1]
        assert reasons == []


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("llama", {"batch": 3}, "a micro-batch of 3 does not split into two equal parts"),
        ("gpt", {"overwrites": "linear_fc2"}, "the weight gradient overwrites main_grad"),
        ("MLA", {}, "the MLP is not an MLP or the attention is not a SelfAttention of Megatron"),
        ("hybrid", {}, "the MLP is not an MLP or the attention is not a SelfAttention of Megatron"),
    ],
    ids=["odd", "weight", "MLA", "hybrid"],
)
def test_a_layer_that_batch_overlap_does_not_support_is_counted(
    te_ranks: World, kind: str, given: dict[str, Any], reason: str
) -> None:
    case = Model(kind, strict=False, **{**SPLIT, **given})
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == [reason]
        # A linear that is supported is overlapped alone, on the whole batch: two in each layer, and the output layer.
        assert kind == "MLA" or calls["copy_gemm"] == 2 * 2 + 1


def test_experts_and_duplicated_layers_are_listed(te_ranks: World) -> None:
    for _, _, listed in te_ranks.run(RANKS, model_against_stock, Model("experts")):
        assert any("expert layer" in reason for reason in listed.values())
    for _, _, listed in te_ranks.run(RANKS, model_against_stock, Model("MLA")):
        assert "every rank holds the whole weight" in listed["TELinear"]


def test_a_fused_mlp_that_is_not_supported_is_counted(te_ranks: World) -> None:
    case = Model("fused MLP", strict=False, overwrites="weight")
    for calls, reasons, _ in te_ranks.run(RANKS, model_against_stock, case):
        assert reasons == ["the weight gradient overwrites main_grad"]
        assert calls == {"ag_gemm": 1}, "the output layer is Megatron's"


def test_tp_comm_overlap_together_with_the_plugin_is_an_error(tmp_path: Path) -> None:
    config = ROOT / "configs" / "gpu/llama3_8b_tp8/overlap.yaml"
    with pytest.raises(ConfigError, match=r"train.tp_comm_overlap: true: .*overlap.tensor.method=none"):
        load_launch_config(config, ["train.tp_comm_overlap=true"])
    assert load_launch_config(config, ["train.tp_comm_overlap=true", "overlap.tensor.method=none"])
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('the script runs')\n")
    argv = [str(script), TE_OVERLAP, "--overlap-device", "cpu"]
    (done,) = start_ranks(1, argv, timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert "remove the flag, or use overlap.tensor.method=none" in done.stdout
    (done,) = start_ranks(1, argv, env=PLUGIN_OFF, timeout_s=60)
    assert "the script runs" in done.stdout
