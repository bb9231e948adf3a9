"""Fused operations equal the references of p2p, in real processes with kernels in the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from tests.helpers.mutants import Edit
from tests.helpers.world import World, assert_same
from tests.ops.tensor_parallel import linear_all_reduce_workers, linear_workers
from tests.ops.tensor_parallel.fused import fused_workers

SEQUENCE = ["all_gather_linear", "linear_reduce_scatter"]
PLAIN = ["linear_all_reduce", "copy_linear"]
PLANS = {
    "push, remote stores": FusedPlan(chunk_rows=7),
    "pull, staged stores": FusedPlan(mover="pull", stores="staged", chunk_rows=7),
    "ring, one tile a shard, one SM": FusedPlan(mover="ring", chunk_rows=64, spare_sms=1, kernel="hopper"),
}


def with_each_plan(first: str, second: str) -> list[object]:
    """Two operations with all plans. The daily run has one operation of each plan."""
    daily = zip(PLANS, (first, second, first), strict=True)
    return [
        pytest.param(op, PLANS[plan], id=f"{op}-{plan}", marks=[] if op == of_plan else [pytest.mark.long])
        for plan, of_plan in daily
        for op in (first, second)
    ]


@pytest.mark.parametrize(("op", "plan"), with_each_plan(*SEQUENCE))
@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_equals_reference(interpreting: World, num_ranks: int, op: str, plan: FusedPlan) -> None:
    """37 rows: shards and chunks differ in length."""
    interpreting.run(num_ranks, linear_workers.against_reference, op, 37, 48, 33, torch.float32, plan, late=False)


@pytest.mark.parametrize(("op", "plan"), with_each_plan(*PLAIN))
def test_all_reduce_equals_reference(interpreting: World, op: str, plan: FusedPlan) -> None:
    bits = interpreting.run(
        4, linear_all_reduce_workers.against_reference, op, 37, 48, 33, torch.float32, plan, late=False
    )
    assert_same(bits)


@pytest.mark.parametrize(
    "main_grad", [pytest.param(False, marks=pytest.mark.long), True], ids=["own gradient", "main_grad"]
)
@pytest.mark.parametrize("op", SEQUENCE + PLAIN)
def test_over_two_hosts(interpreting: World, op: str, main_grad: bool) -> None:
    """Fused inside hosts of two ranks, late messages between hosts. 37 rows: hosts own different numbers of rows."""
    case = (linear_workers if op in SEQUENCE else linear_all_reduce_workers).against_reference
    plan = FusedPlan(chunk_rows=7)
    interpreting.run(4, case, op, 37, 48, 33, torch.float32, plan, late=True, main_grad=main_grad, hosts=2)


@pytest.mark.parametrize(
    "dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.long)], ids=["fp16", "fp32"]
)
@pytest.mark.parametrize("op", SEQUENCE + PLAIN)
def test_weight_gradient_goes_into_main_grad(interpreting: World, op: str, dtype: torch.dtype) -> None:
    case = (linear_workers if op in SEQUENCE else linear_all_reduce_workers).against_reference
    interpreting.run(2, case, op, 40, 32, 48, dtype, FusedPlan(), late=False, main_grad=True)


def test_activation_recomputation(interpreting: World) -> None:
    plain, again = (interpreting.run(2, fused_workers.recomputed, checkpoint) for checkpoint in (False, True))
    for left, right in zip(plain, again, strict=True):
        assert left == pytest.approx(right, rel=1e-6)


def test_no_gather_waits_for_the_garbage_collector(interpreting: World) -> None:
    assert interpreting.run(2, fused_workers.num_gathers_kept) == [0, 0]


def test_memory_is_twice_the_largest_gathered_activation_and_zero_before_the_first_operation(
    interpreting: World,
) -> None:
    for sizes in interpreting.run(2, fused_workers.memory):
        assert sizes[0] == (0, 0)
        assert all(bound <= num_bytes <= bound + 8192 for num_bytes, bound in sizes[1:])
        assert sizes[2] == sizes[3]
        assert sizes[1] < sizes[2]


@pytest.mark.parametrize("stores", ["remote", "staged"])
def test_epochs_begin_again_before_they_exceed_a_flag(interpreting: World, stores: str) -> None:
    assert interpreting.run(2, fused_workers.numbered_anew, stores) == [(10, [True] * 24)] * 2


def test_kernels_set_no_flags_at_peers_without_atomics(interpreting: World) -> None:
    assert interpreting.run(2, fused_workers.staged_bytes) == [[0, 4 * 4 * 4]] * 2


def test_wrong_shapes_are_refused_and_a_timeout_is_reported(interpreting: World) -> None:
    for rank, messages in enumerate(interpreting.run(2, fused_workers.refused)):
        assert [text.split(":")[0] for text in messages] == ["x_shard", "x_shard", "x", *["all_gather_linear"] * 2]
        assert f"rank {rank}: a CUDA graph is being captured; a replay would write" in messages[3]
        assert f"rank {rank}: operation 1 of this group timed out waiting for a peer" in messages[4]


@pytest.mark.parametrize(
    ("name", "value"),
    [("mover", "throw"), ("stores", "none"), ("kernel", "fast"), ("chunk_rows", 0), ("spare_sms", -1)],
)
def test_an_unknown_plan_value_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}: {value}: must be"):
        FusedPlan(**{name: value})  # type: ignore[arg-type]


SITUATIONS = {
    "push": ({}, {}),
    "late push": ({}, {"late_copies": True}),
    "pull": ({"mover": "pull"}, {"late_start": True}),
    "ring": ({"mover": "ring"}, {"late_copies": True}),
    "staged": ({"stores": "staged"}, {"late_gemm": True}),
}
NO_ACKNOWLEDGEMENT = Edit("comm.symmetric.transport", "if self._epoch > 2:", "if False:")
FLAG, COPY = (
    "copying.write(self.flags_of(to), flag, self.epoch)",
    "copying.copy(rows_of[to][rows], rows_of[source][rows])",
)
MUTANTS = {
    "no wait for acknowledgements": ("push", NO_ACKNOWLEDGEMENT),
    "acknowledgement of an older operation": (
        "push",
        Edit("comm.symmetric.transport", "self._epoch - 2)", "self._epoch - 4)"),
    ),
    "one acknowledgement is enough": (
        "push",
        Edit("comm.symmetric.transport", "self.wait_all(acknowledgements,", "self.wait_all(acknowledgements[:1],"),
    ),
    "acknowledged before it is summed": (
        "push",
        Edit(
            "ops.tensor_parallel.fused.linear",
            "        received = self._op.slot(",
            "        self._op.acknowledge()\n        received = self._op.slot(",
        ),
    ),
    "stale epoch of a flag": (
        "push",
        Edit("comm.symmetric.transport", FLAG, FLAG.replace("self.epoch", "self.epoch - 1")),
    ),
    "flag before the copy": (
        "late push",
        Edit("comm.symmetric.transport", f"{COPY}\n                    {FLAG}", f"{FLAG}; {COPY}"),
    ),
    "wrong owner's flag": (
        "push",
        Edit("comm.symmetric.transport", "flag = owner * parts + part", "flag = to * parts + part"),
    ),
    "pulled before it is ready": (
        "pull",
        Edit(
            "comm.symmetric.transport", "copying.wait(transport._words(rank, ready, size), owner, self.epoch)", "pass"
        ),
    ),
    "forwarded before it is complete": (
        "ring",
        Edit("comm.symmetric.transport", "copying.wait(self.flags, flag, self.epoch)", "pass"),
    ),
    "sent before it is complete": (
        "staged",
        Edit(
            "comm.symmetric.transport", "backend.copying.wait(staged_flags, owner * parts + part, self.epoch)", "pass"
        ),
    ),
    "waits before the GEMM is launched": (
        "staged",
        Edit(
            "ops.tensor_parallel.fused.linear",
            "        config = self._kernels.config(a, b)\n",
            "        self._op.send_staged(staged, self._layout)\n        config = self._kernels.config(a, b)\n",
        ),
    ),
}


@pytest.mark.parametrize("situation", SITUATIONS)
def test_protocol(interpreting: World, tmp_path: Path, situation: str) -> None:
    plan, late = SITUATIONS[situation]
    assert interpreting.run(3, fused_workers.protocol, plan, (), tmp_path, **late) == [[]] * 3


# The default run includes one of them: each takes half a minute in the interpreter.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if number else []) for number, name in enumerate(MUTANTS)]
)
def test_a_wrong_protocol_is_caught(interpreting: World, tmp_path: Path, name: str) -> None:
    situation, edit = MUTANTS[name]
    plan, late = SITUATIONS[situation]
    assert any(interpreting.run(3, fused_workers.protocol, plan, (edit,), tmp_path, **late))


LAYER_MUTANTS = {
    "one slot for two operations": Edit(
        "comm.symmetric.transport", "return epoch % 2 * aligned(self.slot_bytes)", "return 0"
    ),
    "acknowledged before wgrad": Edit(
        "ops.tensor_parallel.fused.linear",
        "        for launch in launches:\n",
        "        self._op.acknowledge()\n        for launch in launches:\n",
    ),
}


def test_two_operations_in_flight(interpreting: World) -> None:
    """The backward of a column-parallel layer gathers and scatters concurrently."""
    assert interpreting.run(2, fused_workers.layers) == [[]] * 2


@pytest.mark.parametrize("name", LAYER_MUTANTS)
def test_a_wrong_layer_is_caught(interpreting: World, name: str) -> None:
    assert any(interpreting.run(2, fused_workers.layers, (LAYER_MUTANTS[name],)))


def test_layers_over_two_hosts(interpreting: World) -> None:
    assert interpreting.run(4, fused_workers.layers, hosts=2) == [[]] * 4


HOST_MUTANTS = {
    "rows before they arrive": Edit(
        "ops.tensor_parallel.nodes",
        "            for message in work.needs:\n                self._p2p_work.wait(message)\n",
        "",
    ),
    "sums before they arrive": Edit(
        "ops.tensor_parallel.nodes",
        "        for message in range(len(self._received)):\n            self._p2p_work.wait(message)\n",
        "",
    ),
    "rows of another host": Edit(
        "ops.tensor_parallel.nodes", "nodes.rows(a.shape[0], work.chunks[0].owner)", "nodes.rows(a.shape[0], 0)"
    ),
    "gathered in the order of ranks": Edit(
        "ops.tensor_parallel.nodes",
        "self._nodes.rows(self._num_rows, work.chunks[0].owner)",
        "self._nodes.rows(self._num_rows, self._nodes.num_nodes - 1 - work.chunks[0].owner)",
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] if number else []) for number, name in enumerate(HOST_MUTANTS)],
)
def test_wrong_layers_over_two_hosts_are_caught(interpreting: World, name: str) -> None:
    assert any(interpreting.run(4, fused_workers.layers, (HOST_MUTANTS[name],), hosts=2))
