"""Training on whole documents equals stock attention with a mask on one rank, for every parallel layout."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from megatron_overlap.tools.launch.processes import RunError
from tests.adapters.megatron_runs import assert_equal_training
from tests.adapters.varlen import core_attention_workers as workers
from tests.adapters.varlen.runs import config, train, write_text
from tests.helpers.te import needs_te
from tests.helpers.world import World

LAYERS, SHORT, LONG = 2, 4, 20


class Reference(Protocol):
    def __call__(self, iterations: int, arch: str = "llama", layers: str = "local") -> dict[int, dict[str, Any]]: ...


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("varlen"))


@pytest.fixture(scope="module")
def one_rank(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Training of the same tokens on one rank with stock attention and a mask."""
    folder = tmp_path_factory.mktemp("one_rank")

    @cache
    def reference(iterations: int, arch: str = "llama", layers: str = "local") -> dict[int, dict[str, Any]]:
        cfg = config(
            f"{layers}{arch}{iterations}",
            data,
            method="masked",
            iterations=iterations,
            arch=arch,
            transformer_impl=layers,
        )
        return train(folder, cfg)[0]

    return reference


def assert_attended(reports: list[dict[str, Any]], micro_batches: int) -> None:
    """Balanced attention ran forward and backward in every layer of every micro-batch, on every rank."""
    for report in reports:
        calls = {(m["op"], m["direction"]): m["overlapped"] for m in report["modules"] if m["kind"] == "attention"}
        for direction in ("forward", "dgrad"):
            assert calls["balanced_attention", direction] == LAYERS * micro_batches
        assert report["totals"]["fallbacks"] == 0


@pytest.mark.long
def test_two_context_ranks(data: Path, one_rank: Reference, tmp_path: Path) -> None:
    rows, reports = train(tmp_path, config("cp2", data, context=2))
    assert_equal_training(rows, one_rank(SHORT))
    assert_attended(reports, 2 * SHORT)


@pytest.mark.long
def test_two_context_and_two_tensor_ranks(data: Path, one_rank: Reference, tmp_path: Path) -> None:
    rows, reports = train(tmp_path, config("cp2tp2", data, context=2, tensor=2, distributed_optimizer=True))
    assert_equal_training(rows, one_rank(SHORT))
    assert_attended(reports, 2 * SHORT)


@needs_te
@pytest.mark.parametrize(
    ("tensor", "dtype", "copies"),
    [
        pytest.param(1, torch.float32, True, id="1-fp32"),
        pytest.param(2, torch.bfloat16, False, id="2-bf16"),
        pytest.param(1, torch.bfloat16, False, id="1-bf16", marks=pytest.mark.long),
        pytest.param(2, torch.float32, True, id="2-fp32", marks=pytest.mark.long),
    ],
)
def test_a_model_of_transformer_engine_layers(
    four_te_ranks: World, tensor: int, dtype: torch.dtype, copies: bool
) -> None:
    """Two context ranks, with and without tensor and sequence parallelism, equal one with stock attention."""
    linears = {"ag_gemm": 2 * 2 + 1, "gemm_rs": 2 * 2} if tensor > 1 else {}
    for calls, reasons in four_te_ranks.run(4, workers.te_model_against_stock, tensor, dtype, copies=copies):
        assert reasons == []
        assert calls == {"balanced_attention": 2, **linears}


@needs_te
@pytest.mark.long
@pytest.mark.parametrize("tensor", [1, 2])
def test_training_of_transformer_engine_layers(tensor: int, data: Path, one_rank: Reference, tmp_path: Path) -> None:
    engine = "transformer_engine"
    cfg = config("te", data, context=2, tensor=tensor, transformer_impl=engine, distributed_optimizer=True)
    rows, reports = train(tmp_path, cfg)
    assert_equal_training(rows, one_rank(SHORT, layers=engine))
    assert_attended(reports, 2 * SHORT)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "2 ranks": {"context": 2},
    "3 ranks": {"context": 3},
    "4 ranks": {"context": 4, "distributed_optimizer": True},
    "2 ranks, ring": {"context": 2, "method": "ring"},
    "3 ranks, all-gather": {"context": 3, "method": "all_gather"},
    "2 x 2 tensor ranks": {"context": 2, "tensor": 2},
    "2 x 2 tensor ranks, sharded": {"context": 2, "tensor": 2, "distributed_optimizer": True},
    "2 x 2 replicas, sharded": {"context": 2, "replicas": 2, "distributed_optimizer": True},
    "recomputed": {"context": 2, "recompute": "full"},
    "attention recomputed": {"context": 2, "recompute": "selective"},
    "gpt": {"context": 2, "arch": "gpt"},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_parallel_layouts(layout: str, data: Path, one_rank: Reference, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    if layout == "3 ranks":
        # Megatron needs a sequence length that is a multiple of 2 x 3.
        assert config("x", data, context=3).train.seq_length % 6 == 0
    rows, _ = train(tmp_path, config("run", data, iterations=LONG, **options))
    assert len(rows) == LONG
    assert_equal_training(rows, one_rank(LONG, options.get("arch", "llama")))


# Arguments without a key in the launch configuration, and the beginning of the error message.
REFUSED = {
    "--mtp-num-layers 1": "--mtp-num-layers: 1: not with overlap.varlen: multi-token prediction",
    "--num-experts 2": "--num-experts: 2: not with overlap.varlen: the auxiliary loss",
    "--cuda-graph-impl local": "--cuda-graph-impl: local: not with overlap.varlen: CUDA graphs",
    "--window-size 4,0": "--window-size: (4, 0): not with overlap.varlen: the plan balances full",
    "--multi-latent-attention": "--multi-latent-attention: True: not",
    "--reset-position-ids": "--reset-position-ids: True: not",
    "--reset-attention-mask": "--reset-attention-mask: True: not",
    "--sft": "--sft: True: not",
    "--qk-clip": "--qk-clip: True: not with overlap.varlen: it reads the scores",
    "--log-max-attention-logit": "--log-max-attention-logit: True: not with overlap.varlen: it reads the scores",
    "--full-validation": "--full-validation: True: not with overlap.varlen: the loaders",
    "--eval-micro-batch-size 2": "--eval-micro-batch-size: 2: not",
    "--spec a b": "--spec: ['a', 'b']: not",
    "--dataloader-type single": "--dataloader-type: single: not",
    "--pipeline-model-parallel-size 2": "--pipeline-model-parallel-size: 2: not",
    "--micro-batch-size 2": "--micro-batch-size: 2: not",
    "--fp8-format hybrid": "--fp8-format: hybrid: not with overlap.varlen: its GEMMs need rows",
    "--tp-comm-overlap": "--tp-comm-overlap: True: not with overlap.varlen: userbuffers need",
    "--attention-dropout 0.1": "--attention-dropout: 0.1: not with overlap.varlen: use 0",
    "--position-embedding-type yarn": "--position-embedding-type: yarn: not",
    "--mock-data": "--mock-data: True: not",
    "--data-path a b": "--data-path: ['a', 'b']: not",
    "--softmax-type learnable": "--softmax-type: learnable: not",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[World]:
    """Separate workers, because imported and adapted Megatron modules cannot be unloaded."""
    processes = World(1, answer_s=120, adapted=True)
    yield processes
    processes.close()


def test_unsupported_arguments_are_named(worker: World) -> None:
    cfg = config("x", Path("data"))
    flag_lists = [[], *(flags.split() for flags in REFUSED)]
    supported, *texts = worker.run(1, workers.argument_errors, cfg, flag_lists, "balanced")[0]
    assert supported == ""
    for text, start in zip(texts, REFUSED.values(), strict=True):
        assert text.startswith(start)
        assert "\n" not in text
    assert worker.run(1, workers.argument_errors, cfg, [["--context-parallel-size", "2"]], "masked")[0][0].startswith(
        "--context-parallel-size: 2: not"
    )


def test_the_provided_scripts_refuse_what_only_those_of_megatron_read(worker: World) -> None:
    given: list[dict[str, object]] = [{"spec": ["a", "b"]}, {"sft": True, "fim_data": True}]
    spec, data = worker.run(1, workers.script_errors, given)[0]
    assert spec.startswith("the provided scripts do not support --spec: run Megatron-LM's pretrain_gpt.py")
    assert data.startswith("the provided scripts do not support --sft, --fim-data: ")


def test_unsupported_calls_are_named(worker: World) -> None:
    texts = worker.run(1, workers.core_attention_errors)[0]
    assert len(texts) == 3
    assert all("without a micro-batch of documents" in text for text in texts)


def test_documents_of_a_pair(worker: World, tmp_path: Path) -> None:
    found = worker.run(1, workers.read_documents, tmp_path, 4)[0]
    tokens = [[row[0] for row in document] for document in found]
    labels = [[row[1] for row in document] for document in found]
    assert tokens == [[1, 2], [4, 5, 6, 7], [10, 11, 12, 13], [14, 15]]
    assert labels == [[2, 3], [5, 6, 7, 8], [11, 12, 13, 14], [15, 16]]
    assert {row[2] for document in found for row in document} == {1}


def test_nodes_and_splits(worker: World) -> None:
    nodes, splits = worker.run(1, workers.nodes_and_splits)[0]
    assert nodes == [1, 1, 2, 1, 1, 3]
    assert splits == [[0, 200, 200, 200], [0, 194, 200, 200], [0, 100, 200, 200]]


def test_an_empty_split_is_named(worker: World, tmp_path: Path) -> None:
    (text,) = worker.run(1, workers.empty_split, tmp_path)
    assert text == "--split: 100,0,0: leaves no documents of two ids or more for validation"


@pytest.mark.long
def test_an_empty_split_fails_before_the_first_step(data: Path, tmp_path: Path) -> None:
    cfg = config("empty", data, eval_iterations=1)
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"split": "100,0,0"})})
    with pytest.raises(RunError, match="--split: 100,0,0: leaves no documents of two ids or more for validation"):
        train(tmp_path, cfg)
