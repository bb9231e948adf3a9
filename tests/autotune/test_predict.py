"""The prediction orders candidates: what it says by hand, and that it agrees with what is plainly better."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_overlap.autotune.candidates import HOPPER, KNOBS, STOCK, Call, Candidate, fused_variants, one_knob_apart
from megatron_overlap.autotune.predict import MAX_TRIED, Costs, candidates, predict_us, shortlist
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan
from tests.tools.simulate.machines import machine

# A million operations a microsecond, whatever the rows; messages of 100 us and 100 bytes a microsecond.
COSTS = Costs({64: 1e6, 1024: 1e6}, 100.0, 100.0, 200.0, 50.0)
COLUMN = Call("ag_gemm", 1024, 512, 1024, "bfloat16", 2)


def test_by_hand() -> None:
    gemm = 2 * 1024 * 512 * 1024 / 1e6  # 1074 us
    moved = 1024 * 512 * 2 / 2  # bytes
    collective = 200 + moved / 50
    messages = 100 + moved / 100
    one_slice = gemm / 2
    own = collective + gemm + max(gemm, collective) * 2
    assert predict_us(COSTS, COLUMN, STOCK, 2) == pytest.approx(own)
    forward = max(gemm, messages + one_slice)
    backward = max(2 * gemm, 2 * messages + one_slice)
    assert predict_us(COSTS, COLUMN, Candidate("p2p", "direct", 1), 2) == pytest.approx(forward + backward)
    alone = replace(COLUMN, backward=False)
    assert predict_us(COSTS, alone, STOCK, 2) == pytest.approx(collective + gemm)
    assert predict_us(COSTS, alone, Candidate("p2p", "serial", 1), 2) == pytest.approx(gemm + messages)


def test_more_chunks_pay_where_messages_are_long_and_cost_where_they_are_short() -> None:
    one, four = Candidate("p2p", "direct", 1), Candidate("p2p", "direct", 4)
    assert predict_us(COSTS, COLUMN, four, 2) < predict_us(COSTS, COLUMN, one, 2)
    few = replace(COLUMN, rows=64)
    assert predict_us(COSTS, few, four, 2) > predict_us(COSTS, few, one, 2)
    assert shortlist(COSTS, few, [one, four], 2)[0] == one


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "copy_gemm", "gemm_ar"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_shortlist_is_short_and_holds_the_default(op: str, ranks: int) -> None:
    call = replace(COLUMN, op=op, ranks=ranks)
    possible = candidates(call, None, None, device_type="cpu", item_bytes=2)
    assert len(possible) == len(set(possible))
    assert ("ring" in {each.pattern for each in possible}) == (ranks > 2 and not call.sums)
    tried = shortlist(COSTS, call, possible, 2)
    assert 1 <= len(tried) <= MAX_TRIED
    assert possible[0] in tried


def test_what_the_config_fixes_is_the_only_candidate() -> None:
    assert candidates(COLUMN, "ring", 3, device_type="cpu", item_bytes=2) == [Candidate("p2p", "ring", 3)]
    few = candidates(replace(COLUMN, rows=16), None, None, device_type="cpu", item_bytes=2)
    assert [each.chunks_per_rank for each in few] == [1, 2]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [16, 1024, 8192])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_no_two_candidates_are_the_same_messages(op: str, ranks: int, rows: int, device_type: str) -> None:
    call = Call(op, rows // ranks * ranks, 512, 1024, "bfloat16", ranks)
    possible = candidates(call, None, None, device_type=device_type, item_bytes=2)
    row_bytes = 2 * (512 if op == "ag_gemm" else 1024)
    device = torch.device(device_type)

    def sent(each: Candidate) -> str:
        plan = LinearPlan(each.pattern, each.chunks_per_rank)
        return repr(
            [
                plan.schedule(collective, SimpleNamespace(size=ranks, rank=rank), call.rows, row_bytes, device).messages  # type: ignore[arg-type]
                for collective in ("all_gather", "reduce_scatter")
                for rank in range(ranks)
            ]
        )

    messages = [sent(each) for each in possible]
    assert len(messages) == len(set(messages))
    # What serves where nobody chooses comes first.
    assert messages[0] == sent(Candidate("p2p"))


def test_costs_of_a_profile_are_those_of_its_model() -> None:
    model = machine(latency_us=3.0, launch_us=2.0)
    costs = Costs.of_model(model, model.link(4), (512, 1024))
    assert costs.gemm_us(1024, 512, 1024) == pytest.approx(model.gemm_us(1024, 512, 1024))
    assert costs.messages_us(1, 4000) == pytest.approx(model.message_us(4000, model.link(4)))


def test_candidates_survive_json() -> None:
    for each in (STOCK, HOPPER, *fused_variants(COLUMN, True), Candidate("p2p", "ring", 4), Candidate("p2p")):
        assert Candidate.of(json.loads(json.dumps(each.as_dict()))) == each
    for wrong in (
        {},
        {"method": "p2p", "chunks_per_rank": 0},
        {"method": "p2p", "pattern": "star"},
        {"method": "fused", "knobs": {"mover": "throw"}},
        {"method": "fused", "knobs": {"colour": "red"}},
        {"method": "fused", "knobs": "push"},
    ):
        with pytest.raises(ValueError, match="not a way to run"):
            Candidate.of(wrong)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4096), (8, 4096), (8, 64)])
def test_every_fused_variant_is_reached_from_the_default_knob_by_knob(ranks: int, rows: int, hopper: bool) -> None:
    call = replace(COLUMN, ranks=ranks, rows=rows)
    variants = fused_variants(call, hopper)
    assert variants[0] == Candidate("fused")
    assert len(variants) == len(set(variants))
    assert (HOPPER in variants) == hopper
    assert any(("mover", "ring") in each.knobs for each in variants) == (ranks > 2)
    sizes = {value for each in variants for name, value in each.knobs if name == "chunk_rows"}
    assert sizes == {(2, 4096): {128, 2048}, (8, 4096): {128}, (8, 64): set()}[ranks, rows]
    seen, new = {variants[0]}, [variants[0]]
    while new:
        one = new.pop()
        fresh = [each for each in variants if each not in seen and one_knob_apart(one, each)]
        seen |= set(fresh)
        new += fresh
    assert seen == set(variants)
    assert not one_knob_apart(variants[0], variants[0])
    assert not one_knob_apart(STOCK, Candidate("p2p"))


def test_every_knob_is_a_field_of_a_fused_plan_with_its_default_first() -> None:
    defaults = FusedPlan()
    for name, values in KNOBS.items():
        assert getattr(defaults, name) == values[0]
        for value in values:
            FusedPlan(**{name: value})  # type: ignore[arg-type]
