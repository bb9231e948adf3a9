"""Selection of Hopper kernels for the GEMMs of fused operations, and the counted reasons against them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_overlap.kernels import hopper_self_test as self_test
from megatron_overlap.kernels.launch import ALIGNED_SMALL, HOPPER, HOPPER_SMALL, GemmConfig
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedKernels, FusedPlan, Hopper

A, B, OUT = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 32), (32, 48), (64, 48)))
WIDE, NARROW = GemmConfig(128, 256, 64), GemmConfig(128, 128, 64, num_stages=4)


def test_the_output_tile_equals_that_of_the_portable_kernel() -> None:
    hopper = Hopper("")
    assert hopper.config(A, B, WIDE, OUT) == HOPPER
    assert hopper.config(A, B, NARROW, OUT) == HOPPER_SMALL
    assert hopper.config(A, B, WIDE, None) == HOPPER
    assert not hopper.not_used


def test_each_portable_gemm_is_counted_with_its_reason() -> None:
    hopper = Hopper("")
    assert hopper.config(A[:, :24], B[:24], WIDE, OUT) == WIDE
    assert hopper.config(A[:, :24], B[:24], WIDE, OUT) == WIDE
    assert hopper.config(A.float(), B.float(), WIDE, None) == WIDE
    assert sorted(hopper.not_used.values()) == [1, 2]
    refused = Hopper("it failed its trial")
    assert refused.config(A, B, WIDE, OUT) == WIDE
    assert refused.not_used == {"it failed its trial": 1}


def transport(device: str) -> Any:
    backend = SimpleNamespace(device=torch.device(device), num_sms=4, capability=90)
    return SimpleNamespace(tables={}, backend=backend)


def test_only_a_plan_with_hopper_selects_them() -> None:
    group = transport("cpu")
    group.tables["hopper"] = Hopper("")
    asked, default = (FusedKernels(group, plan) for plan in (FusedPlan(kernel="hopper"), FusedPlan()))
    assert asked.config(A, B, OUT) == asked.config(A, B) == HOPPER_SMALL
    assert default.config(A, B, OUT) == default.config(A, B) == ALIGNED_SMALL[90]


def test_a_transport_runs_the_self_test_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def objection(device: torch.device) -> str:
        asked.append(device)
        return "the trial failed"

    monkeypatch.setattr(self_test, "hopper_unsupported_reason", objection)
    mine = transport("cuda:1")
    assert Hopper.of(mine).unsupported_reason == "the trial failed"
    assert Hopper.of(mine) is Hopper.of(mine)
    assert asked == [torch.device("cuda:1")]
    assert Hopper.of(transport("cpu")).unsupported_reason == "Hopper kernels need CUDA, not cpu"
