"""Every transport runs the programs of `contract.py` with the same results."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_overlap.comm import TransportOptions, nccl
from tests.comm import contract
from tests.comm.contract import ExchangeCase
from tests.comm.device import Recorder, play
from tests.helpers.world import World

CASES = {
    "direct": ExchangeCase(num_ranks=3, pattern="direct"),
    "ring": ExchangeCase(num_ranks=4, pattern="ring"),
    "two ranks": ExchangeCase(num_ranks=2, chunks_per_rank=3),
    "several tensors": ExchangeCase(num_ranks=3, num_extra_tensors=2),
    "several tensors, ring": ExchangeCase(num_ranks=3, pattern="ring", num_extra_tensors=1),
    "nothing to send": ExchangeCase(num_ranks=2, num_elements=0),
    "operations in flight": ExchangeCase(num_ranks=3, pattern="ring", num_operations=10),
}
NUM_CHUNKS = {name: (case.num_ranks - 1) * case.chunks_per_rank for name, case in CASES.items()}


def num_results(name: str) -> int:
    """Tensors that one rank receives in all operations of an all-gather."""
    case = CASES[name]
    return NUM_CHUNKS[name] * (1 + case.num_extra_tensors) * case.num_operations


@pytest.mark.parametrize("program", contract.PROGRAMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("transport", contract.TRANSPORTS)
def test_a_transport_on_the_host_fulfils_the_contract(world: World, transport: str, case: str, program: str) -> None:
    for count, wrong in world.run(CASES[case].num_ranks, contract.run_on_workers, transport, program, CASES[case]):
        assert wrong == []
        assert count == num_results(case) or program == "reduce_scatter"
        assert count > 0


@pytest.mark.parametrize("program", contract.PROGRAMS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slow", [None, "compute", "nccl"])
def test_nccl_fulfils_the_contract_on_its_recording_device(
    monkeypatch: pytest.MonkeyPatch, slow: str | None, case: str, program: str
) -> None:
    devices, results = [], []
    for rank in range(CASES[case].num_ranks):
        device = Recorder(rank, CASES[case].num_ranks)
        monkeypatch.setattr(nccl, "torch", device.torch)
        monkeypatch.setattr(nccl, "dist", device.dist)
        monkeypatch.setattr(nccl, "store_beside", lambda group: None)
        group: Any = SimpleNamespace()
        transport = nccl.NcclTransport(group, TransportOptions(timeout_s=5))
        results.append(
            contract.PROGRAMS[program](
                transport, lambda work, device=device: device.put("work", action=work), CASES[case]
            )
        )
        devices.append(device)
    assert play(devices, slow=slow) == []
    for of_rank in results:
        assert contract.wrong(of_rank) == []
        assert len(of_rank) == num_results(case) or program == "reduce_scatter"


@pytest.mark.parametrize("case", ["direct", "two ranks", "operations in flight"])
def test_symmetric_memory_of_the_host_gathers_the_same(world: World, case: str) -> None:
    for wrong in world.run(CASES[case].num_ranks, contract.symmetric_all_gather, CASES[case]):
        assert wrong == []


def test_the_contract_finds_corrupted_messages(world: World) -> None:
    case = replace(CASES["direct"], chunks_per_rank=1)
    for count, wrong in world.run(3, contract.run_on_workers, "corrupting", "all_gather", case):
        assert count == len(wrong) == 2


def test_a_lost_message_is_an_error_that_names_the_peer(world: World) -> None:
    (_, sender), (_, receiver) = world.run(2, contract.run_on_workers, "losing", "all_gather", CASES["two ranks"])
    assert sender == [] or "rank 0 could not" in sender[0]
    assert receiver[0].startswith("all_gather 0: rank 1 could not ")
    assert "rank 0 within 0.5 s" in receiver[0]
