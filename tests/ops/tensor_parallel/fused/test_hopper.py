"""Selection of Hopper kernels for the GEMMs of fused operations, and the counted reasons against them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_overlap.kernels.ag_gemm import ag_gemm as portable_ag_gemm
from megatron_overlap.kernels.configs import ALIGNED_SMALL, HOPPER, HOPPER_SMALL
from megatron_overlap.kernels.gemm_rs import gemm_to_owners as portable_gemm_to_owners
from megatron_overlap.kernels.hopper import self_test
from megatron_overlap.kernels.hopper.ag_gemm import ag_gemm
from megatron_overlap.kernels.hopper.gemm_rs import gemm_to_owners
from megatron_overlap.kernels.launch import GemmConfig
from megatron_overlap.ops.tensor_parallel.fused import intra_node
from megatron_overlap.ops.tensor_parallel.fused.hopper import Hopper
from megatron_overlap.ops.tensor_parallel.fused.plan import FusedPlan

A, B, OUT = (torch.zeros(shape, dtype=torch.bfloat16) for shape in ((64, 32), (32, 48), (64, 48)))
WIDE, NARROW = GemmConfig(128, 256, 64), GemmConfig(128, 128, 64, num_stages=4)


def test_the_output_tile_equals_that_of_the_portable_kernel() -> None:
    hopper = Hopper("")
    assert hopper.gathering(A, B, WIDE, OUT) == (ag_gemm, HOPPER)
    assert hopper.gathering(A, B, NARROW, OUT) == (ag_gemm, HOPPER_SMALL)
    assert hopper.scattering(A, B, WIDE) == (gemm_to_owners, HOPPER)
    assert not hopper.not_used


def test_each_portable_gemm_is_counted_with_its_reason() -> None:
    hopper = Hopper("")
    assert hopper.gathering(A[:, :24], B[:24], WIDE, OUT) is None
    assert hopper.gathering(A[:, :24], B[:24], WIDE, OUT) is None
    assert hopper.scattering(A.float(), B.float(), WIDE) is None
    assert sorted(hopper.not_used.values()) == [1, 2]
    refused = Hopper("it failed its trial")
    assert refused.gathering(A, B, WIDE, OUT) is None
    assert refused.not_used == {"it failed its trial": 1}


def transport(device: str) -> Any:
    backend = SimpleNamespace(device=torch.device(device), num_sms=4, capability=90)
    return SimpleNamespace(tables={}, backend=backend)


def test_only_a_plan_with_hopper_selects_them() -> None:
    group = transport("cpu")
    group.tables["hopper"] = Hopper("")
    asked, default = (intra_node._Kernels(group, plan) for plan in (FusedPlan(kernel="hopper"), FusedPlan()))
    assert asked.gathering(A, B, OUT) == (ag_gemm, HOPPER_SMALL)
    assert asked.scattering(A, B) == (gemm_to_owners, HOPPER_SMALL)
    assert default.gathering(A, B, OUT) == (portable_ag_gemm, ALIGNED_SMALL[90])
    assert default.scattering(A, B) == (portable_gemm_to_owners, ALIGNED_SMALL[90])


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
