"""Megatron trains on whole documents: the same tokens on one rank, by Megatron's own attention, say what is right."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from megatron_overlap.tools.launch.processes import RunError
from tests.adapters.megatron_runs import assert_equal_training
from tests.adapters.varlen import core_attention_workers as cases
from tests.adapters.varlen.runs import config, train, write_text
from tests.helpers.world import World

LAYERS, SHORT, LONG = 2, 4, 20


class Reference(Protocol):
    def __call__(self, iterations: int, arch: str = "llama") -> dict[int, dict[str, Any]]: ...


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("varlen"))


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Training of the same tokens on one rank, in Megatron's own attention with a mask."""
    folder = tmp_path_factory.mktemp("alone")

    @cache
    def reference(iterations: int, arch: str = "llama") -> dict[int, dict[str, Any]]:
        name = f"{arch}{iterations}"
        return train(folder, config(name, data, method="masked", iterations=iterations, arch=arch))[0]

    return reference


def assert_attended(reports: list[dict[str, Any]], micro_batches: int) -> None:
    """Every layer of every micro-batch went through the engine, forth and back, on every rank."""
    for report in reports:
        calls = {(m["op"], m["direction"]): m["overlapped"] for m in report["modules"] if m["kind"] == "attention"}
        for direction in ("forward", "dgrad"):
            assert calls["balanced_attention", direction] == LAYERS * micro_batches
        assert report["totals"]["fallbacks"] == 0


@pytest.mark.long
def test_two_context_ranks(data: Path, alone: Reference, tmp_path: Path) -> None:
    rows, reports = train(tmp_path, config("cp2", data, context=2))
    assert_equal_training(rows, alone(SHORT))
    assert_attended(reports, 2 * SHORT)


@pytest.mark.long
def test_two_context_and_two_tensor_ranks(data: Path, alone: Reference, tmp_path: Path) -> None:
    rows, reports = train(tmp_path, config("cp2tp2", data, context=2, tensor=2, distributed_optimizer=True))
    assert_equal_training(rows, alone(SHORT))
    assert_attended(reports, 2 * SHORT)


LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "2 ranks": {"context": 2},
    "3 ranks": {"context": 3},
    "4 ranks": {"context": 4, "distributed_optimizer": True},
    "2 ranks, every document cut": {"context": 2, "method": "ring"},
    "3 ranks, all keys gathered": {"context": 3, "method": "all_gather"},
    "2 x 2 tensor ranks": {"context": 2, "tensor": 2},
    "2 x 2 tensor ranks, sharded": {"context": 2, "tensor": 2, "distributed_optimizer": True},
    "2 x 2 copies, sharded": {"context": 2, "copies": 2, "distributed_optimizer": True},
    "recomputed": {"context": 2, "recompute": "full"},
    "attention recomputed": {"context": 2, "recompute": "selective"},
    "gpt": {"context": 2, "arch": "gpt"},
}


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout(layout: str, data: Path, alone: Reference, tmp_path: Path) -> None:
    options = LAYOUTS[layout]
    if layout == "3 ranks":
        # Megatron wants a length that 2 x 3 divides, and 768 is one.
        assert config("x", data, context=3).train.seq_length % 6 == 0
    rows, _ = train(tmp_path, config("run", data, iterations=LONG, **options))
    assert len(rows) == LONG
    assert_equal_training(rows, alone(LONG, options.get("arch", "llama")))


# Arguments that no key of a launch config says, or that a launch of one's own has; and what the line begins with.
REFUSED = {
    "--mtp-num-layers 1": "--mtp-num-layers: 1: not with overlap.varlen: multi-token prediction",
    "--num-experts 2": "--num-experts: 2: not with overlap.varlen: a mixture of experts",
    "--cuda-graph-impl local": "--cuda-graph-impl: local: not with overlap.varlen: CUDA graphs",
    "--window-size 4,0": "--window-size: (4, 0): not with overlap.varlen: the plan balances full",
    "--multi-latent-attention": "--multi-latent-attention: True: not",
    "--reset-position-ids": "--reset-position-ids: True: not",
    "--reset-attention-mask": "--reset-attention-mask: True: not",
    "--sft": "--sft: True: not",
    "--spec a b": "--spec: ['a', 'b']: not",
    "--dataloader-type single": "--dataloader-type: single: not",
    "--pipeline-model-parallel-size 2": "--pipeline-model-parallel-size: 2: not",
    "--micro-batch-size 2": "--micro-batch-size: 2: not",
    "--transformer-impl transformer_engine": "--transformer-impl: transformer_engine: not",
    "--attention-dropout 0.1": "--attention-dropout: 0.1: not with overlap.varlen: use 0",
    "--position-embedding-type yarn": "--position-embedding-type: yarn: not",
    "--mock-data": "--mock-data: True: not",
    "--data-path a b": "--data-path: ['a', 'b']: not",
    "--softmax-type learnable": "--softmax-type: learnable: not",
}


@pytest.fixture(scope="module")
def worker() -> Iterator[World]:
    """Workers of their own: Megatron, once imported and adapted, stays."""
    workers = World(answer_s=120, adapted=True)
    yield workers
    workers.close()


def test_what_is_not_done_is_refused_by_its_argument(worker: World) -> None:
    cfg = config("x", Path("data"))
    changes = [[], *(flags.split() for flags in REFUSED)]
    right, *texts = worker.run(1, cases.refusals, cfg, changes, "balanced")[0]
    assert right == ""
    for text, start in zip(texts, REFUSED.values(), strict=True):
        assert text.startswith(start)
        assert "\n" not in text
    assert worker.run(1, cases.refusals, cfg, [["--context-parallel-size", "2"]], "masked")[0][0].startswith(
        "--context-parallel-size: 2: not"
    )


def test_what_a_layer_is_not_for_is_refused(worker: World) -> None:
    texts = worker.run(1, cases.core_refusals)[0]
    assert [text.split(": ")[2] for text in texts[:3]] == [
        "--attention-dropout 0.1",
        "attention mask padding",
        "cross-attention",
    ]
    assert len(texts) == 6
    assert all("without a micro-batch of documents" in text for text in texts[3:])


def test_documents_are_read_as_they_are(worker: World, tmp_path: Path) -> None:
    found = worker.run(1, cases.documents, tmp_path, 4)[0]
    tokens = [[row[0] for row in document] for document in found]
    labels = [[row[1] for row in document] for document in found]
    assert tokens == [[1, 2], [4, 5, 6, 7], [10, 11, 12, 13], [14, 15]]
    assert labels == [[2, 3], [5, 6, 7, 8], [11, 12, 13, 14], [15, 16]]
    assert {row[2] for document in found for row in document} == {1}


def test_nodes_and_parts(worker: World) -> None:
    nodes, parts = worker.run(1, cases.small_things)[0]
    assert nodes == [1, 1, 2, 1, 1, 3]
    assert parts == [[0, 200, 200, 200], [0, 194, 200, 200], [0, 100, 200, 200]]


def test_a_part_without_documents_is_refused_before_the_first_step(data: Path, tmp_path: Path) -> None:
    cfg = config("empty", data, eval_iterations=1)
    cfg = cfg.model_copy(update={"data": cfg.data.model_copy(update={"split": "100,0,0"})})
    with pytest.raises(RunError, match="--split: 100,0,0: leaves no documents of two ids or more for validation"):
        train(tmp_path, cfg)
