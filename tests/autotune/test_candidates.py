"""Candidates: no two are the same messages, the configuration limits them, and fused variants reach each other."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron_overlap.autotune.candidates import (
    HOPPER,
    KNOBS,
    STOCK,
    Call,
    Candidate,
    fused_variants,
    max_candidates,
    one_knob_apart,
    p2p_candidates,
)
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan
from megatron_overlap.ops.tensor_parallel.plan import LinearPlan

COLUMN = Call("ag_gemm", 1024, 512, 1024, "bfloat16", 2)


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "copy_gemm", "gemm_ar"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_there_are_few_candidates_and_rings_only_where_they_differ(op: str, ranks: int) -> None:
    call = replace(COLUMN, op=op, ranks=ranks)
    candidates = p2p_candidates(call, None, None, device_type="cpu", item_bytes=2)
    assert len(candidates) == len(set(candidates))
    assert len({str(each) for each in candidates}) == len(candidates), "names identify candidates"
    assert ("ring" in {each.pattern for each in candidates}) == (ranks > 2 and not call.all_reduces)
    assert len(candidates) + 1 <= max_candidates(ranks, fused=False)


def test_fixed_settings_leave_one_candidate() -> None:
    assert p2p_candidates(COLUMN, "ring", 3, device_type="cpu", item_bytes=2) == [Candidate("p2p", "ring", 3)]
    few = p2p_candidates(replace(COLUMN, rows=16), None, None, device_type="cpu", item_bytes=2)
    assert [each.chunks_per_rank for each in few] == [1, 2]


@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [16, 1024, 8192])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_no_two_candidates_send_the_same_messages(op: str, ranks: int, rows: int, device_type: str) -> None:
    call = Call(op, rows // ranks * ranks, 512, 1024, "bfloat16", ranks)
    candidates = p2p_candidates(call, None, None, device_type=device_type, item_bytes=2)
    row_bytes = 2 * (512 if op == "ag_gemm" else 1024)
    device = torch.device(device_type)

    def messages_of(each: Candidate) -> str:
        plan = LinearPlan(each.pattern, each.chunks_per_rank)
        return repr(
            [
                plan.schedule(collective, SimpleNamespace(size=ranks, rank=rank), call.rows, row_bytes, device)[
                    0
                ].messages  # type: ignore[arg-type]
                for collective in ("all_gather", "reduce_scatter")
                for rank in range(ranks)
            ]
        )

    messages = [messages_of(each) for each in candidates]
    assert len(messages) == len(set(messages))
    assert messages[0] == messages_of(Candidate("p2p")), "the default comes first"


def test_names_of_candidates() -> None:
    names = {
        "stock": STOCK,
        "p2p": Candidate("p2p"),
        "p2p direct": Candidate("p2p", "direct"),
        "p2p ring x 4": Candidate("p2p", "ring", 4),
        "p2p x 2": Candidate("p2p", None, 2),
        "fused kernel=hopper": HOPPER,
        "fused mover=pull spare_sms=8": Candidate("fused", knobs=(("mover", "pull"), ("spare_sms", 8))),
    }
    assert {str(candidate): candidate for candidate in names.values()} == names
    variants = fused_variants(replace(COLUMN, rows=8192, ranks=8), hopper=True)
    assert len({str(each) for each in variants}) == len(variants)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4096), (8, 4096), (8, 64)])
def test_every_fused_variant_is_reached_from_the_default_knob_by_knob(ranks: int, rows: int, hopper: bool) -> None:
    call = replace(COLUMN, ranks=ranks, rows=rows)
    variants = fused_variants(call, hopper=hopper)
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
