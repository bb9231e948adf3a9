"""Settings that autotuning measures: no two send the same messages, and fused ones are one field apart."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from megatron_overlap.comm import Transport
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan
from megatron_overlap.schedules.heuristics import (
    KNOBS,
    balanced_rows,
    default_chunks,
    default_slices_per_gemm,
    fused_settings,
    max_p2p_settings,
    one_knob_apart,
    p2p_settings,
)
from megatron_overlap.schedules.plan import Pattern


@pytest.mark.parametrize("all_reduces", [False, True])
@pytest.mark.parametrize("ranks", [2, 8])
def test_there_are_few_settings_and_rings_only_where_they_differ(all_reduces: bool, ranks: int) -> None:
    settings = p2p_settings(ranks, 1024, 1024, "cpu", all_reduces=all_reduces)
    assert len(settings) == len(set(settings)) <= max_p2p_settings(ranks)
    assert ("ring" in {pattern for pattern, _ in settings}) == (ranks > 2 and not all_reduces)


def test_fixed_settings_leave_one() -> None:
    fixed = p2p_settings(2, 1024, 1024, "cpu", all_reduces=False, pattern="ring", chunks=3)
    assert fixed == [("ring", 3)]
    few = p2p_settings(2, 16, 1024, "cpu", all_reduces=False)
    assert [chunks for _, chunks in few] == [1, 2]


@pytest.mark.parametrize(
    ("ranks", "rows", "hidden", "exposed"),
    [
        (8, 8200, 1, 1),
        (8, 8192, 2, 1),
        (8, 4096, 2, 2),
        (8, 2048, 4, 2),
        (8, 64, 4, 2),
        (4, 1024, 2, 2),
        (3, 30, 1, 1),
        (2, 64, 1, 1),
        (1, 64, 1, 1),
        (8, 0, 4, 2),
    ],
)
def test_slices_with_few_rows_share_a_gemm(ranks: int, rows: int, hidden: int, exposed: int) -> None:
    assert default_slices_per_gemm(ranks, rows, hidden=True) == hidden
    assert default_slices_per_gemm(ranks, rows, hidden=False) == exposed


def place(ranks: int, rank: int, copy_engines: bool = False) -> Transport:
    """A schedule needs nothing of the transport but who is there."""
    return cast(Transport, SimpleNamespace(size=ranks, rank=rank, copy_engines=copy_engines))


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 2), (4, 1), (8, 1)])
def test_copy_engines_send_whole_slices(ranks: int, chunks: int) -> None:
    for collective in ("all_gather", "reduce_scatter"):
        assert default_chunks(collective, ranks, 8192, 16384, copy_engines=True) == chunks  # type: ignore[arg-type]


@pytest.mark.parametrize("row_bytes", [1024, 2048])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [16, 1024, 8192])
@pytest.mark.parametrize(("device_type", "copy_engines"), [("cpu", False), ("cuda", False), ("cuda", True)])
def test_no_two_settings_send_the_same_messages(
    row_bytes: int, ranks: int, rows: int, device_type: str, copy_engines: bool
) -> None:
    rows = rows // ranks * ranks
    device = torch.device(device_type)

    def messages_of(pattern: Pattern | None, chunks: int | None) -> str:
        plan = LinearPlan(pattern, chunks)
        return repr(
            [
                plan.schedule(collective, place(ranks, rank, copy_engines), rows, row_bytes, device)[0].messages  # type: ignore[arg-type]
                for collective in ("all_gather", "reduce_scatter")
                for rank in range(ranks)
            ]
        )

    settings = p2p_settings(ranks, rows, row_bytes, device_type, all_reduces=False, copy_engines=copy_engines)
    messages = [messages_of(*each) for each in settings]
    assert len(messages) == len(set(messages))
    assert messages[0] == messages_of(None, None), "the default comes first"


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("ranks", "rows"), [(2, 4096), (8, 4096), (8, 64)])
def test_every_fused_setting_is_reached_from_the_default_knob_by_knob(ranks: int, rows: int, hopper: bool) -> None:
    settings = fused_settings(ranks, rows, hopper=hopper)
    assert settings[0] == ()
    assert len(settings) == len(set(settings))
    assert ((("kernel", "hopper"),) in settings) == hopper
    assert any(("mover", "ring") in each for each in settings) == (ranks > 2)
    sizes = {value for each in settings for name, value in each if name == "chunk_rows"}
    assert sizes == {(2, 4096): {128, 2048}, (8, 4096): {128}, (8, 64): set()}[ranks, rows]
    seen, new = {settings[0]}, [settings[0]]
    while new:
        one = new.pop()
        fresh = [each for each in settings if each not in seen and one_knob_apart(one, each)]
        seen |= set(fresh)
        new += fresh
    assert seen == set(settings)
    assert not one_knob_apart(settings[0], settings[0])
    assert not one_knob_apart((("mover", "pull"),), (("stores", "staged"),))


def test_every_knob_is_a_field_of_a_fused_plan_with_its_default_first() -> None:
    defaults = FusedPlan()
    for name, values in KNOBS.items():
        assert getattr(defaults, name) == values[0]
        for value in values:
            FusedPlan(**{name: value})  # type: ignore[arg-type]


def test_both_parts_of_a_sequence_take_as_long() -> None:
    gemms = ((768, 4096), (4096, 512), (3584, 4096), (4096, 1792))
    linear = sum(columns * depth for columns, depth in gemms)
    for num_rows, num_ranks in ((512, 8), (1024, 8), (101, 2)):
        first = balanced_rows(num_rows, num_ranks, 1, gemms, 512) * num_ranks
        rows = num_rows * num_ranks
        times = [
            3 * linear * (stop - start) + 3.5 * 512 * (stop**2 - start**2)
            for start, stop in ((0, first), (first, rows))
        ]
        assert max(times) / min(times) < 1 + 4 * num_ranks / rows
        assert first > rows / 2
    # Without attention, both parts are equal.
    assert balanced_rows(64, 2, 1, gemms, 0) == 32
    assert balanced_rows(2, 2, 1, gemms, 512) == 1


def test_a_sequence_is_split_where_tiles_fill_the_waves() -> None:
    """132 processors: 33 tile rows of 4 tiles fill a wave; 32 and 34 leave one row to a second wave."""
    assert balanced_rows(66 * 128, 1, 1, ((1024, 1024),), 0, processors=132) == 33 * 128
    assert balanced_rows(99 * 128, 1, 1, ((1024, 1024),), 0, processors=132) in (33 * 128, 66 * 128)
