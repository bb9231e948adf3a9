"""`read_run`: aggregation over ranks, and the errors of incomplete run directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.tools.launch.run_records import Fallback, RunRecordError, read_run


def step(iteration: int, time_ms: float, loss: float | None, memory: int = 10) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "step_time_ms": time_ms,
        "loss": loss,
        "grad_norm": 2.0,
        "skipped": False,
        "peak_memory_bytes": memory,
        "time": 0.0,
    }


def report(overlapped: int, fallbacks: dict[str, int]) -> dict[str, Any]:
    module = {"kind": "column", "name": "8->16", "op": "ag_gemm", "direction": "forward", "fallbacks": fallbacks}
    totals = {"overlapped": overlapped, "fallbacks": sum(fallbacks.values()), "bytes": 100}
    return {"active": True, "reason": "replaced", "modules": [module], "totals": totals}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rows = {
        0: [step(1, 10.0, None), step(2, 30.0, None, 50)],
        1: [step(1, 20.0, 7.5), step(2, 15.0, 7.25)],
    }
    for rank, steps in rows.items():
        (tmp_path / f"steps-rank{rank}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in steps))
        (tmp_path / f"report-rank{rank}.json").write_text(json.dumps(report(3, {"bias": 2, "fp8": rank})))
    (tmp_path / "meta-rank0.json").write_text(json.dumps({"device": "cpu"}))
    return tmp_path


def test_values_are_aggregated_over_ranks(run: Path) -> None:
    record = read_run(run, 2, 2)
    assert record.step_time_ms == (20.0, 30.0)
    assert record.losses == (7.5, 7.25)  # only the last pipeline stage records it
    assert record.grad_norms == (2.0, 2.0)
    assert record.peak_memory_bytes == 50
    assert record.report is not None
    assert record.report.overlapped_calls == 6
    assert record.report.sent_bytes == 200
    assert record.report.fallbacks[0] == Fallback("column 8->16", "ag_gemm", "forward", "bias", 4)
    assert record.report.fallbacks[1].calls == 1


def test_a_resumed_run_has_later_iterations_only(run: Path) -> None:
    for rank in range(2):
        (run / f"steps-rank{rank}.jsonl").write_text(
            json.dumps(step(9, 1.0, 1.0)) + "\n" + json.dumps(step(10, 1.0, 1.0))
        )
    assert read_run(run, 2, 10).iterations == (9, 10)


def test_without_the_plugin_there_is_no_report(run: Path) -> None:
    for rank in range(2):
        (run / f"report-rank{rank}.json").unlink()
    assert read_run(run, 2, 2).report is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("steps-rank1.jsonl", None, "recorded no steps"),
        ("steps-rank1.jsonl", json.dumps(step(1, 1.0, None)), "the last step is 1, must be 2"),
        ("steps-rank1.jsonl", "", "the last step is 0, must be 2"),
        ("steps-rank1.jsonl", '{"iteration": 1, "step', "not JSON lines"),
        ("steps-rank1.jsonl", json.dumps(step(2, 1.0, None)), "its iterations differ from those of rank 0"),
        ("meta-rank0.json", None, "No such file"),
        ("meta-rank0.json", "[]", "is not a JSON object"),
        ("meta-rank0.json", "{", "not JSON"),
    ],
)
def test_the_error_names_the_incomplete_file(run: Path, file: str, content: str | None, message: str) -> None:
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_text(content)
    with pytest.raises(RunRecordError, match=message) as caught:
        read_run(run, 2, 2)
    assert file in str(caught.value)
