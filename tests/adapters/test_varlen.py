"""Megatron trains on whole documents: the same tokens on one rank, by Megatron's own attention, say what is right."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.adapters.megatron_runs import assert_equal_training
from tests.adapters.varlen_runs import config, train, write_text

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
            assert calls["remap", direction] == 2 * LAYERS * micro_batches
        assert report["totals"]["fallbacks"] == 0


def test_two_context_ranks(data: Path, alone: Reference, tmp_path: Path) -> None:
    rows, reports = train(tmp_path, config("cp2", data, context=2))
    assert_equal_training(rows, alone(SHORT))
    assert_attended(reports, 2 * SHORT)


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
