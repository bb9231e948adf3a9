"""Simulated passes of generation: the cache of a decode, padded rows, and what `auto` selects."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.tools.simulate.layer import BATCHES, PROMPTS, generation_us
from tests.tools.simulate.machines import job, machine


@pytest.mark.parametrize(("tensor", "batch", "rows"), [(1, 8, 8), (4, 8, 8), (4, 1, 4)])
def test_a_decode_reads_the_keys_and_values_of_its_rows(tensor: int, batch: int, rows: int) -> None:
    """Sequence parallelism pads the rows to a multiple of the ranks, each of which has a share of the heads."""
    model = machine(memory_gbps=1.0)
    half, whole = (
        generation_us(job(tensor=tensor, seq_length=length), model, {"stock": "stock"})["stock"][f"decode {batch}"]
        for length in (1024, 2048)
    )
    num_bytes = 2 * rows * 1024 * (1024 // tensor) * 2
    assert whole - half == pytest.approx(num_bytes / 1e9 * 1e6)


def test_auto_overlaps_long_prompts_and_leaves_decode_to_the_stock_path() -> None:
    # Launches of more and smaller GEMMs cost more than the messages of few rows.
    model = machine(tflops=100.0, gbps=100.0, launch_us=30.0)
    found = generation_us(job(tensor=4), model, {"stock": "stock", "p2p": "p2p", "auto": "auto"})
    assert list(found["auto"]) == [f"prefill {n}" for n in PROMPTS] + [f"decode {n}" for n in BATCHES]
    for name, us in found["auto"].items():
        assert us <= min(found["stock"][name], 1.1 * found["p2p"][name])
    assert found["auto"]["prefill 8192"] < 0.9 * found["stock"]["prefill 8192"]
    for batch in BATCHES:
        assert found["auto"][f"decode {batch}"] == found["stock"][f"decode {batch}"] < found["p2p"][f"decode {batch}"]


def test_pipeline_and_data_parallel_ranks_do_not_count() -> None:
    alone, many = job(tensor=2), job(tensor=2, pipeline=4, data=2, micro_batch_size=2)
    assert generation_us(alone, machine(), {"p2p": "p2p"}) == generation_us(many, machine(), {"p2p": "p2p"})


@pytest.mark.parametrize("config", ["gpu/llama3_70b_tp4_pp8/overlap", "gpu/mixtral_8x7b_tp4_ep8/overlap"])
def test_the_command_prints_and_writes_the_passes(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert cli.main(["simulate", config, "--generation", "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "Prefill of N tokens" in shown
    assert "Decode of N requests" in shown
    for number in map(str, (*PROMPTS, *BATCHES)):
        assert number in shown.split(), "headings are not cut"
    found = json.loads(out.read_text())["generation_us"]
    assert set(found) >= {"stock path", "this plugin, p2p", "this plugin, auto"}
    prefill = [found["stock path"][f"prefill {n}"] for n in PROMPTS]
    assert prefill == sorted(prefill)
