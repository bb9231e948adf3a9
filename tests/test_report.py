"""The report: excluded modules, buffers and symmetric memory."""

from __future__ import annotations

from dataclasses import replace

from megatron_overlap.counters import AutotuneLine, Counters, Site, SymmetricMemory, Tally
from megatron_overlap.session_report import PatchLine, Report
from megatron_overlap.tools.launch.command import progress_line

MIB = 1024 * 1024
EMPTY = Report(True, "", False, {}, {"tensor": "p2p"}, (), {})


def test_excluded_modules_are_reported() -> None:
    counters = Counters(strict=True)
    counters.exclude("VocabParallelEmbedding", "no GEMM")
    made = replace(EMPTY, not_overlapped=counters.excluded)
    assert "not overlapped: VocabParallelEmbedding: no GEMM" in made.render()
    data = made.as_dict()
    assert data["not_overlapped"] == {"VocabParallelEmbedding": "no GEMM"}
    assert data["totals"]["fallbacks"] == 0


def test_buffers_are_reported_by_ranks_and_use() -> None:
    sizes = {"partial": 3 * MIB, "received": 12 * MIB}
    made = replace(EMPTY, buffers=(("ranks 0, 1", sizes), ("data of ranks 0, 2", {})))
    lines = [line for line in made.render().splitlines() if "buffers" in line]
    assert lines == ["communication buffers of ranks 0, 1: 15.0 MiB (received 12.0, partial 3.0)"]
    assert made.as_dict()["buffers"][0] == {"ranks": "ranks 0, 1", "bytes": sizes}


def test_symmetric_memory_and_portable_kernels_are_reported_by_group() -> None:
    groups = (
        SymmetricMemory(num_ranks=8, num_bytes=2100, bound_bytes=2000, portable={}),
        SymmetricMemory(num_ranks=4, num_bytes=900, bound_bytes=800, portable={"Hopper kernels: too narrow": 3}),
    )
    text = replace(EMPTY, symmetric_memory=groups).render(200)
    assert "2100 bytes in a group of 8 ranks, twice its largest gathered activation (2000 bytes) and flags" in text
    assert "3 GEMMs ran portable kernels: Hopper kernels: too narrow" in text
    assert text.count("portable") == 1
    (_, second) = replace(EMPTY, symmetric_memory=groups).as_dict()["symmetric_memory"]
    assert second["portable"] == {"Hopper kernels: too narrow": 3}


def test_without_fused_kernels_symmetric_memory_is_omitted() -> None:
    assert "symmetric" not in EMPTY.render()
    assert "none allocated" in replace(EMPTY, symmetric_memory=()).render()


def test_a_feature_that_no_call_used_is_a_line() -> None:
    """Only where the config names the method: `auto` may find nothing to overlap."""
    features = {
        "tensor": "p2p",
        "split": "batch",
        "data": "auto",
        "ulysses": "none",
        "expert": "p2p",
        "varlen": "balanced",
    }
    sites = {
        Site("column", "8->4", "ag_gemm", "forward"): Tally(),
        Site("attention", "4x8", "balanced_attention", "forward"): Tally(),
    }
    assert "no call" not in replace(EMPTY, active=False, features=features).render()
    text = replace(EMPTY, active=True, features=features, sites=sites).render()
    assert "not overlapped: overlap.expert: no call on this rank" in text
    assert text.count("no call on this rank") == 1
    for baseline in ("ring", "all_gather"):
        text = replace(EMPTY, active=True, features={"varlen": baseline}).render()
        assert "not overlapped: overlap.varlen: no call on this rank" in text
    sites[Site("expert", "4 experts", "experts", "forward")] = Tally()
    assert "no call on this rank" not in replace(EMPTY, active=True, features=features, sites=sites).render()


LONG_NAME = "InferenceLayerNormColumnParallelLinear.forward"
FULL = replace(
    EMPTY,
    versions={"megatron_overlap": "0.2.0", "megatron-core": "0.19.2", "torch": "2.13.0", "transformer_engine": "2.20"},
    features=dict.fromkeys(("tensor", "attention", "split", "data", "ulysses", "expert", "varlen"), "none"),
    patches=(PatchLine(f"module:{LONG_NAME}", "dataset_helpers", "absent", "needs transformer_engine " * 2, False),),
    sites={Site("column", "8->4", "ag_gemm", "forward"): Tally()},
    not_overlapped={"VocabParallelEmbedding": "no GEMM " * 20},
    autotuning=(AutotuneLine("column 8->4", "ag_gemm", 8, "bf16", "training", "p2p", 1.0, 2.0, "measured"),),
    numerics_check={"gemm_rs 8->4 dw": 0.5},
    unchecked="the training loop does not call next_step",
    buffers=(("ranks 0, 1", {f"{name}_buffer": MIB for name in "abcdefghijkl"}),),
    symmetric_memory=(SymmetricMemory(8, 2100, 2000, {"Hopper kernels: too narrow": 3}),),
    transports={"ranks 0, 1": "NCCL: " + "the memory of peers is not mapped " * 5},
)


def test_launch_shows_every_line_of_the_report() -> None:
    lines = FULL.render().splitlines()
    assert [line for line in lines if progress_line(line) != line.rstrip()] == []
    assert len([line for line in lines if not line.startswith(tuple("┏┃┡│├└"))]) == 12


def test_no_name_of_a_replaced_function_is_cut() -> None:
    assert LONG_NAME in FULL.render()
