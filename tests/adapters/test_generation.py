"""Generation on Megatron's engines: greedy tokens equal those of the stock path, and every call is counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.adapters import generation_workers as workers
from tests.adapters.generation_workers import Case
from tests.adapters.tensor_parallel import linear_workers
from tests.helpers.te import needs_te
from tests.helpers.world import World, assert_same

P2P = {"method": "p2p"}
CASES = {
    "static": Case("static", tensor=P2P),
    "dynamic": Case("dynamic", tensor=P2P, llama=True),
    "dynamic-sp": Case("dynamic", sp=True, tensor=P2P, llama=True),
    "static-auto": Case("static", threshold=12, llama=True),
    "dynamic-sp-auto": Case("dynamic", sp=True, threshold=16),
    "query-split": Case("static", tensor={"method": "p2p", "attention": "query_split"}),
    "query-split-sp": Case("dynamic", sp=True, tensor={"method": "p2p", "attention": "query_split"}),
    "batch-overlap": Case("static", tensor={"method": "p2p", "split": "batch"}, prompts=4),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[World]:
    """Two ranks, whose tensor-parallel group is not that of other tests."""
    workers = World(2, answer_s=120, sizes=(2,), adapted=True)
    workers.run(2, linear_workers.start)
    yield workers
    workers.close()


def check(ranks: World, size: int, case: Case) -> None:
    answers = ranks.run(size, workers.tokens, case)
    assert_same([answer.mine for answer in answers])
    for answer in answers:
        assert answer.mine == answer.stock
        assert len({tuple(each) for each in answer.stock}) > 1, "different prompts have different continuations"
        assert answer.engine == case.engine
        assert {call["direction"] for call in answer.calls} == {"forward only"}
        assert not any(call["fallbacks"] for call in answer.calls)
        calls = {(call["name"], call["op"]): call for call in answer.calls}
        for call in calls.values():
            if call["op"] == "copy_gemm":
                assert call["not_communicating"] > 0
                assert call["overlapped"] == call["bytes"] == 0
            else:
                assert call["overlapped"] > 0, "a prefill is overlapped"
                assert call["bytes"] > 0
                decoded = case.new_tokens - 1
                assert (call.get("stock_selected", 0) >= decoded) == (case.threshold is not None)
        outputs = [call for call in answer.calls if call["kind"] == "column" and call["op"] == "copy_gemm"]
        assert outputs, "the output layer computes logits of the last tokens without communication"


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_greedy_tokens_equal_stock(pair: World, case: Case) -> None:
    check(pair, 2, case)


def check_rounding(ranks: World, size: int, case: Case) -> None:
    """Log-probabilities deviate from fp32 at most twice as far as those of stock, and tokens differ in near ties only.

    Greedy decode selects the largest log-probability. Where the runs select different tokens, the log-probabilities of
    both tokens are within that bound in each run.
    """
    answers = ranks.run(size, workers.rounding, replace(case, dtype=torch.bfloat16))
    assert_same(answers)
    (answer, *_) = answers
    assert answer.overlapped > 0
    assert answer.tokens >= case.prompts
    assert 0 < answer.stock_deviation < 1
    assert answer.deviation <= 2 * answer.stock_deviation
    assert all(margin <= 2 * (answer.stock_deviation + answer.deviation) for margin in answer.margins)


@pytest.mark.parametrize("name", ["static", "dynamic-sp"])
def test_in_bf16_log_probabilities_round_as_those_of_stock(pair: World, name: str) -> None:
    check_rounding(pair, 2, CASES[name])


@pytest.mark.parametrize("name", ["query-split", "query-split-sp"])
def test_query_split_leaves_generation_to_the_linear_layers(pair: World, name: str) -> None:
    answer = pair.run(2, workers.tokens, CASES[name])[0]
    assert answer.not_overlapped["query split"].startswith("generation: its attention reads a KV cache")
    assert not any(call["kind"] == "attention" for call in answer.calls)


def test_batch_overlap_leaves_generation_to_the_linear_layers(pair: World) -> None:
    answer = pair.run(2, workers.tokens, CASES["batch-overlap"])[0]
    assert answer.not_overlapped["batch overlap"].startswith("generation: the KV cache is that of the whole batch")


@pytest.mark.parametrize("sp", [True, False], ids=["sp", "no-sp"])
def test_the_documented_log_probabilities_are_those_of_each_sequence_alone(pair: World, sp: bool) -> None:
    for calls in pair.run(2, workers.policy, Case("", sp=sp, tensor=P2P, llama=True, prompts=8)):
        assert {call["direction"] for call in calls} == {"forward only"}
        assert not any(call["fallbacks"] for call in calls)
        assert sum(call["overlapped"] for call in calls) >= 2 * 2, "two layers, each with two row-parallel layers"


@pytest.mark.long
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_50_ragged_prompts_on_four_ranks(four_ranks: World, case: Case) -> None:
    check(four_ranks, 4, replace(case, prompts=50, new_tokens=12, threshold=case.threshold and 100))


@needs_te
@pytest.mark.long
@pytest.mark.parametrize("name", ["static", "dynamic-sp", "dynamic-sp-auto"])
def test_te_layers(four_te_ranks: World, name: str) -> None:
    check(four_te_ranks, 4, replace(CASES[name], te=True))


LONG = {
    f"{engine}-{architecture}": Case(
        engine, sp=engine == "dynamic", tensor=P2P, llama=architecture == "llama", prompts=50, new_tokens=12
    )
    for engine in ("static", "dynamic")
    for architecture in ("gpt", "llama")
}


@pytest.fixture(scope="module")
def te_pair() -> Iterator[World]:
    """As `pair`, with TransformerEngine."""
    workers = World(2, answer_s=120, sizes=(2,), te=True)
    workers.run(2, linear_workers.start)
    yield workers
    workers.close()


@pytest.mark.long
@pytest.mark.parametrize("name", LONG)
@pytest.mark.parametrize(
    "fixture", ["pair", "four_ranks", *(pytest.param(name, marks=needs_te) for name in ("te_pair", "four_te_ranks"))]
)
def test_50_ragged_prompts_in_bf16(fixture: str, name: str, request: pytest.FixtureRequest) -> None:
    te, size = "te_" in fixture, 2 if fixture.endswith("pair") else 4
    check_rounding(request.getfixturevalue(fixture), size, replace(LONG[name], te=te))
