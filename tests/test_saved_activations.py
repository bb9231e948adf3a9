"""What is kept is counted once where it is one tensor, and the report shows both choices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_overlap.counters import Counters, Report
from megatron_overlap.saved_activations import SavedActivations, SavedMemory, SavedSite

QKV, UP = SavedSite("column", "8->4", "ag_gemm"), SavedSite("column", "8->6", "ag_gemm")
MIB = 1024 * 1024


def test_own_rows_of_one_input_count_once_gathered_rows_each_time() -> None:
    for gathered, peak in ((False, 15), (True, 60)):
        counter = SavedActivations(gathered=gathered)
        ends = [counter.keep(QKV, 1, 10, 20), counter.keep(UP, 1, 10, 30), counter.keep(QKV, 2, 5, 10)]
        assert counter.live_bytes == peak
        ends[0]()
        assert counter.live_bytes == (15 if not gathered else 40)
        ends[1]()
        assert counter.live_bytes == (5 if not gathered else 10)
        ends[2]()
        assert counter.live_bytes == 0
        memory = counter.snapshot()
        assert {memory.peak_bytes, memory.otherwise_peak_bytes} == {15, 60}
        assert memory.peak_bytes == peak
        assert memory.calls == (
            (QKV, *((20, 10) if gathered else (10, 20))),
            (UP, *((30, 10) if gathered else (10, 30))),
        )
        assert memory.choice == ("never" if gathered else "always")


def report(kept: SavedMemory, left: dict[str, str]) -> Report:
    return Report(True, "", False, {}, {"tensor": "p2p"}, (), {}, kept, left)


def test_the_report_shows_both_choices_and_what_is_left() -> None:
    counters = Counters(strict=True)
    counters.kept.keep(QKV, 1, 3 * MIB, 12 * MIB)
    counters.leave("VocabParallelEmbedding", "no GEMM")
    made = report(counters.kept.snapshot(), counters.left)
    text = made.render()
    assert "recompute_gather: always" in text
    lines = [line for line in text.splitlines() if "3.00" in line]
    assert len(lines) == 2
    assert all("12.00" in line for line in lines)
    assert "left to Megatron: VocabParallelEmbedding: no GEMM" in text
    data = made.as_dict()
    assert data["memory"]["modules"] == [{**QKV._asdict(), "kept_bytes": 3 * MIB, "otherwise_bytes": 12 * MIB}]
    assert (data["memory"]["peak_bytes"], data["memory"]["otherwise_peak_bytes"]) == (3 * MIB, 12 * MIB)
    assert data["left_to_megatron"] == {"VocabParallelEmbedding": "no GEMM"}
    assert data["totals"]["fallbacks"] == 0


@pytest.mark.parametrize("left", [{}, {"x": "y"}])
def test_nothing_kept_is_not_shown(left: dict[str, str]) -> None:
    assert "recompute_gather" not in report(SavedMemory(), left).render()


def test_buffers_are_shown_by_ranks_and_use() -> None:
    sizes = {"partial": 3 * MIB, "landing": 12 * MIB}
    made = replace(report(SavedMemory(), {}), buffers=(("ranks 0, 1", sizes), ("lane of ranks 0, 2", {})))
    lines = [line for line in made.render().splitlines() if "buffers" in line]
    assert lines == ["buffers for ranks 0, 1, kept for the run: 15.0 MiB (landing 12.0, partial 3.0)"]
    assert made.as_dict()["buffers"][0] == {"ranks": "ranks 0, 1", "bytes": sizes}
