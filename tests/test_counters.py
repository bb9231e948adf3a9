"""What a report says about fused kernels' memory and about kernels that ran instead of others."""

from __future__ import annotations

from dataclasses import replace

from megatron_overlap.counters import Report, SymmetricMemory

EMPTY = Report(True, "", False, {}, {"tensor": "fused"}, (), {})


def test_symmetric_memory_and_portable_kernels_are_told_by_group() -> None:
    groups = (SymmetricMemory(8, 2100, 2000, {}), SymmetricMemory(4, 900, 800, {"Hopper kernels: too narrow": 3}))
    shown = replace(EMPTY, symmetric=groups).render(200)
    assert "2100 bytes in a group of 8 ranks, twice its largest gathered activation (2000 bytes) and flags" in shown
    assert "3 GEMMs ran portable kernels: Hopper kernels: too narrow" in shown
    assert shown.count("portable") == 1
    (_, told) = replace(EMPTY, symmetric=groups).as_dict()["symmetric_memory"]
    assert told["portable"] == {"Hopper kernels: too narrow": 3}


def test_without_fused_kernels_nothing_is_said() -> None:
    assert "symmetric" not in EMPTY.render()
    assert "none allocated" in replace(EMPTY, symmetric=()).render()
