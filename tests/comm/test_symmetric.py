"""Symmetric memory without a GPU: layout of the arena, and equal unsupported reasons on all ranks."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_overlap.comm.host_group import HostGroup, store_beside
from megatron_overlap.comm.symmetric import cuda
from megatron_overlap.comm.symmetric.backend import ALIGNMENT
from megatron_overlap.comm.symmetric.cuda import (
    _register_group,
    _with_deadline,
    local_unsupported_reason,
    open_backend,
    triton_unsupported_reason,
)
from megatron_overlap.comm.symmetric.stream_queue import WAIT_VALUE_32, WRITE_VALUE_32, MemOp
from megatron_overlap.comm.symmetric.transport import MAX_PARTS, ArenaLayout, gathered_bytes
from megatron_overlap.diagnostics.consistency import first_unsupported_reason
from tests.helpers.world import World


@pytest.mark.parametrize("num_ranks", [1, 2, 8, 64])
@pytest.mark.parametrize("slot_bytes", [1, 255, 256, 1 << 20])
def test_nothing_in_an_arena_overlaps(num_ranks: int, slot_bytes: int) -> None:
    layout = ArenaLayout(num_ranks, slot_bytes)
    spans = [(layout.num_bytes, layout.num_bytes)]
    for epoch in (1, 2):
        spans += [
            (layout.slot(epoch), layout.slot(epoch) + slot_bytes),
            (layout.flags(epoch), layout.flags(epoch) + 4 * num_ranks * MAX_PARTS),
            (layout.acknowledgements(epoch), layout.acknowledgements(epoch) + 4 * num_ranks),
            (layout.ready(epoch), layout.ready(epoch) + 4 * num_ranks),
        ]
    spans.sort()
    for (start, stop), (following, _) in zip(spans, spans[1:], strict=False):
        assert start % ALIGNMENT == 0
        assert stop <= following
    assert layout.slot(3) == layout.slot(1) != layout.slot(2)


def test_an_arena_is_twice_the_largest_gathered_activation() -> None:
    largest = gathered_bytes(8192, 8, 8192, 2)
    assert largest == 8192 * 8192 * 2
    assert 2 * largest <= ArenaLayout(8, largest).num_bytes <= 2 * largest + 8192
    # A receive buffer has room for the largest shard from each rank.
    assert gathered_bytes(10, 4, 3, 2) == 4 * 3 * 3 * 2


def first_reason(group: dist.ProcessGroup, reasons: list[str]) -> str:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    return first_unsupported_reason(store_beside(group), rank, size, "test", reasons[rank], 30)


def one_rank_does_not_respond(group: dist.ProcessGroup) -> str:
    rank = dist.get_rank(group)
    store = store_beside(group)
    answer = first_unsupported_reason(store, rank, 3, "silence", "", 0.3) if rank != 1 else ""
    dist.barrier(group)
    return answer


def probe(group: dist.ProcessGroup) -> object:
    return open_backend(group, deadline_s=30)


def test_all_ranks_return_the_same_reason(world: World) -> None:
    assert world.run(3, first_reason, ["", "", ""]) == [""] * 3
    assert world.run(3, first_reason, ["", "no CUDA device", "older"]) == ["rank 1 of the group: no CUDA device"] * 3


def test_a_rank_that_does_not_respond_is_named_within_the_deadline(world: World) -> None:
    first, _, third = world.run(3, one_rank_does_not_respond)
    assert first == third == "rank 1 of the group did not respond within 0.3 s"


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has a GPU")
def test_without_a_gpu_the_reason_is_no_cuda_device(world: World) -> None:
    assert local_unsupported_reason() == "no CUDA device"
    assert world.run(2, probe) == ["rank 0 of the group: no CUDA device"] * 2


def test_triton_that_cannot_launch_kernels_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles a module in C at the first launch, in its cache."""

    def fails() -> None:
        raise RuntimeError("Failed to find C compiler.\nat line 1")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    driver = SimpleNamespace(active=SimpleNamespace(get_current_target=fails))
    monkeypatch.setattr("triton.runtime.driver", driver)
    monkeypatch.setattr(cuda, "triton_unsupported_reason", triton_unsupported_reason.__wrapped__)
    assert local_unsupported_reason() == "triton cannot launch kernels: RuntimeError: Failed to find C compiler."
    driver.active.get_current_target = str
    assert local_unsupported_reason() == ""


def register_name(group: dist.ProcessGroup) -> tuple[str, list[int], tuple[int, int]]:
    rank = dist.get_rank(group)
    host_group = HostGroup(group, range(rank // 2 * 2, rank // 2 * 2 + 2))
    host_group.barrier()
    assert host_group.group is None
    assert (host_group.rank, host_group.size) == (rank % 2, 2)
    name, group_of_host = _register_group(host_group.store, host_group.rank, host_group.size)
    # torch's rendezvous takes the ranks of a name from here.
    resolved = dist.distributed_c10d._resolve_process_group(name)
    assert resolved is group_of_host
    return name, host_group.ranks, (resolved.rank(), resolved.size())


def test_ranks_of_one_host_register_the_same_group_name(world: World) -> None:
    found = world.run(4, register_name)
    assert found[0][0] == found[1][0]
    assert found[2][0] == found[3][0]
    assert found[0][0] != found[2][0]
    assert [ranks for _, ranks, _ in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [resolved for *_, resolved in found] == [(0, 2), (1, 2)] * 2


def test_an_attempt_that_hangs_or_fails_returns_the_reason() -> None:
    import threading

    def fails() -> str:
        raise RuntimeError("peer access is not supported\nat line 1")

    def overlaps() -> str:
        raise RuntimeError("rendezvous: detected allocations from overlapping devices from different ranks.")

    assert _with_deadline(lambda: threading.Event().wait(5) and "" or "", 0.05).startswith(
        "mapping the memory of peers did not finish within"
    )
    assert _with_deadline(fails, 5) == "RuntimeError: peer access is not supported"
    assert _with_deadline(lambda: dict[str, str]()["a group"], 5) == "KeyError: 'a group'"
    assert _with_deadline(overlaps, 5).endswith("let each process see all GPUs of its host (CUDA_VISIBLE_DEVICES)")
    assert _with_deadline(lambda: "", 5) == ""


_LAYOUT = """
#include <cuda.h>
#include <stddef.h>
#include <stdio.h>
typedef CUstreamBatchMemOpParams Op;
#define AT(field) offsetof(Op, waitValue.field), offsetof(Op, writeValue.field)
int main() {
    printf("%zu %zu %zu %zu %zu %zu %zu %d %d", sizeof(Op), AT(address), AT(value), AT(flags),
           CU_STREAM_MEM_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
}
"""


def test_flag_steps_have_the_layout_of_the_driver(tmp_path: Path) -> None:
    """The header of the driver is that of triton's package."""
    compiler, triton = shutil.which("cc"), find_spec("triton")
    if compiler is None or triton is None or triton.origin is None:
        pytest.skip("needs a C compiler and triton")
    (tmp_path / "layout.c").write_text(_LAYOUT)
    include = Path(triton.origin).parent / "backends/nvidia/include"
    subprocess.run([compiler, "-I", include, "-o", "layout", "layout.c"], cwd=tmp_path, check=True)
    printed = subprocess.run([tmp_path / "layout"], capture_output=True, text=True, check=True).stdout
    offsets = [getattr(MemOp, name).offset for name in ("address", "value", "flags") for _ in range(2)]
    assert printed == " ".join(map(str, [ctypes.sizeof(MemOp), *offsets, WAIT_VALUE_32, WRITE_VALUE_32]))
