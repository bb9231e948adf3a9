"""`overlap.deterministic: tp_invariant`: the same bits of the logits on 1, 2 and 4 ranks of a Megatron model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError

from megatron_overlap import OverlapConfig
from tests.adapters.conftest import RANKS
from tests.adapters.tensor_parallel import tp_invariant_workers as workers
from tests.helpers.te import needs_te
from tests.helpers.world import World

SIZES = (1, 2, 4)
OVERLAP = {
    "on": {"tensor": {"method": "p2p"}, "deterministic": "tp_invariant"},
    "off": {"tensor": {"method": "p2p", "schedule": "serial"}, "deterministic": "tp_invariant"},
}
type Table = dict[tuple[int, str, str], torch.Tensor]


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """One set of ranks for each size: the tensor-parallel group of a process stays."""
    made = {size: World(size, answer_s=120, sizes=(size,), adapted=True) for size in SIZES}
    yield made
    for world in made.values():
        world.close()


def table(worlds: dict[int, World], dtype: torch.dtype, sp: bool, overlap: dict[str, object]) -> Table:
    """Logits by number of ranks, overlap and pass."""
    found = {}
    for size in SIZES:
        for name, settings in overlap.items():
            answers = worlds[size].run(size, workers.logits, dtype, sp, settings)
            for what in answers[0]:
                assert all(torch.equal(answer[what], answers[0][what]) for answer in answers)
                found[size, name, what] = answers[0][what]
    return found


@pytest.mark.parametrize(
    ("dtype", "sp"),
    [
        pytest.param(torch.float32, True, id="fp32-sp"),
        pytest.param(torch.bfloat16, False, id="bf16-no-sp"),
        pytest.param(torch.float32, False, id="fp32-no-sp", marks=pytest.mark.long),
        pytest.param(torch.bfloat16, True, id="bf16-sp", marks=pytest.mark.long),
    ],
)
def test_all_logits_have_the_same_bits(worlds: dict[int, World], dtype: torch.dtype, sp: bool) -> None:
    found = table(worlds, dtype, sp, OVERLAP)
    assert len(found) == len(SIZES) * 2 * 2
    first = found[1, "off", "training"]
    assert first.shape == (workers.BATCH, workers.SEQUENCE, workers.VOCABULARY)
    assert first.float().std() > 0.1
    assert [key for key, each in found.items() if not torch.equal(each, first)] == []


def test_without_the_tree_the_bits_depend_on_the_ranks(worlds: dict[int, World]) -> None:
    settings = {"stock": None, "deterministic": {"tensor": {"method": "p2p"}, "deterministic": True}}
    found = table(worlds, torch.float32, True, settings)
    first = found[1, "stock", "training"]
    differ = {key[:2] for key, each in found.items() if not torch.equal(each, first)}
    assert differ == {(size, name) for size in (2, 4) for name in settings}
    for each in found.values():
        torch.testing.assert_close(each, first, rtol=1e-4, atol=1e-4)


@needs_te
def test_te_layers_are_a_counted_fallback(te_ranks: World) -> None:
    for reasons, overlapped in te_ranks.run(RANKS, workers.reasons, workers.SEQUENCE, True):
        assert reasons == {"tp_invariant supports local layers: use --transformer-impl local"}
        assert overlapped == 1, "the output layer is local"


def test_gemms_of_few_rows_are_a_counted_fallback(worlds: dict[int, World]) -> None:
    rows = 16 * 4 // workers.BATCH
    assert worlds[4].run(4, workers.reasons, rows, False) == [(set(), 5)] * 4
    for reasons, overlapped in worlds[4].run(4, workers.reasons, rows - 4, False):
        assert reasons == {"tp_invariant needs GEMMs of 16 rows or more"}
        assert overlapped == 0


def test_a_vocabulary_without_equal_blocks_is_a_counted_fallback(worlds: dict[int, World]) -> None:
    """Backward of the output layer sums over the vocabulary."""
    (found,) = worlds[1].run(1, workers.gradients_of_vocabulary, 61)
    assert found == {"tp_invariant needs a divided dimension of the weight that is a multiple of 4"}


@pytest.mark.parametrize(
    "tensor",
    [{"method": "none"}, {"method": "fused"}, {"schedule": "ring"}, {"split": "batch"}, {"attention": "query_split"}],
)
def test_settings_with_another_order_are_refused(tensor: dict[str, str]) -> None:
    ((key, value),) = tensor.items()
    with pytest.raises(ValidationError, match=f"tp_invariant.*tensor.{key} {value} "):
        OverlapConfig.model_validate({"tensor": tensor, "deterministic": "tp_invariant"})
