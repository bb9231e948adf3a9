"""The linear layers of LLaMA-3 8B and 70B at TP8 on the device model, with each transport.

`python -m tests.ops.tensor_parallel.device_layers` prints a table of their makespans, beside those of two other orders:
all messages of an operation enqueued before its first GEMM, and pipelines like those of userbuffers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_overlap.comm import Transport, TransportOptions, nccl
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.kernels import gemm_rs
from megatron_overlap.ops.tensor_parallel import p2p
from megatron_overlap.ops.tensor_parallel.linear import _ColumnParallel, _RowParallel
from megatron_overlap.ops.tensor_parallel.method import LinearOptions
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, method_for
from megatron_overlap.ops.wgrad import WgradTarget
from megatron_overlap.schedules import Message, gather_scatter
from megatron_overlap.schedules.gather_scatter import Nodes
from tests.comm.copy_engines import EngineBackend
from tests.comm.device import NcclGroup, Op, Recorder
from tests.comm.makespan import Gpu, Work, makespan

RANKS = 8
GPU = Gpu()
LAYERS = {"qkv": "column", "proj": "row", "fc1": "column", "fc2": "row"}
DIRECTIONS = "forward", "backward"


@dataclass(frozen=True)
class Model:
    """A LLaMA-3 with 8 groups of key and value heads of size 128."""

    hidden: int
    ffn: int

    def features(self, layer: str) -> int:
        """The features of a layer that the ranks divide."""
        return {"qkv": self.hidden + 2 * 8 * 128, "proj": self.hidden, "fc1": 2 * self.ffn, "fc2": self.ffn}[layer]


MODELS = {"8b": Model(4096, 14336), "70b": Model(8192, 28672)}


@dataclass(frozen=True)
class Case:
    """One pass of one layer with `rows` gathered rows; `plain` is without sequence parallelism: an all-reduce."""

    layer: str
    rows: int
    direction: str
    model: str = "8b"
    plain: bool = False

    def __str__(self) -> str:
        return f"{self.model} {self.rows} {self.layer} {self.direction}{' plain' * self.plain}"


CASES = [
    Case(layer, rows, way, model) for model in MODELS for rows in (4096, 8192) for layer in LAYERS for way in DIRECTIONS
]
PLAIN_CASES = [
    Case(layer, rows, {"row": "forward", "column": "backward"}[kind], model, plain=True)
    for model in MODELS
    for rows in (4096, 8192)
    for layer, kind in LAYERS.items()
]


def _nccl(patch: pytest.MonkeyPatch, device: Recorder) -> Transport:
    patch.setattr(nccl, "torch", device.torch)
    patch.setattr(nccl, "dist", device.dist)
    patch.setattr(nccl, "store_beside", lambda group: None)
    group: Any = SimpleNamespace()
    return nccl.NcclTransport(group, TransportOptions(timeout_s=5))


def _copies(patch: pytest.MonkeyPatch, device: Recorder) -> Transport:
    backend: Any = EngineBackend(device, GPU)
    return CopyTransport(backend)


TRANSPORTS: Mapping[str, Callable[[pytest.MonkeyPatch, Recorder], Transport]] = {"nccl": _nccl, "copies": _copies}


class Context(SimpleNamespace):
    """The context of an autograd function, for calls without the autograd engine, which needs a GPU."""

    needs_input_grad = (True, True, False, False)

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


def record(
    patch: pytest.MonkeyPatch,
    case: Case,
    transport_name: str = "nccl",
    nodes: Nodes | None = None,
    *,
    has_main_grad: bool = True,
) -> list[Recorder]:
    """Run one pass of a layer on the device model of every rank; with `nodes` by copies inside, and NCCL between."""
    model, column = MODELS[case.model], LAYERS[case.layer] == "column"
    hidden, rows, ranks = model.hidden, case.rows, RANKS if nodes is None else nodes.num_ranks
    features = model.features(case.layer) // ranks
    devices = []
    for rank in range(ranks):
        device = Recorder(rank, ranks)
        with FakeTensorMode():
            transport = TRANSPORTS[transport_name](patch, device)
            if nodes is not None:
                backend: Any = EngineBackend(device, GPU, nodes.members(nodes.node(rank)))
                transport = CopyNodesTransport(CopyTransport(backend), transport, nodes)

            def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
                return torch.empty(shape, device="cuda", dtype=dtype)

            w = empty(features, hidden) if column else empty(hidden, features)
            own_rows = rows if case.plain else rows // ranks
            x = empty(own_rows, hidden) if column else empty(rows, features)
            dy = empty(rows, features) if column else empty(own_rows, hidden)
            main_grad = empty(*w.shape, dtype=torch.float32) if has_main_grad else None
            target = WgradTarget(main_grad, buffer_pool=transport.buffer_pool)
            method = method_for(transport, LinearPlan())
            call = LinearOptions(method, target, sharded=not case.plain, num_rows=rows)
            context = Context(saved_tensors=(x, w), call=call)
            function: Any = _ColumnParallel if column else _RowParallel
            device.ops.clear()  # the operations of the transport's creation

            def add_terms(
                terms: torch.Tensor, own: torch.Tensor, out: torch.Tensor, divisor: int, device: Recorder = device
            ) -> None:
                moved = terms.nbytes + own.nbytes + out.nbytes
                device.put("work", "add_terms", seconds=GPU.move_s(moved), uses_sms=True)

            patch.setattr(gemm_rs, "add_terms", add_terms)
            patch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "")
            with Work(device, GPU):
                if case.direction == "backward":
                    function.backward(context, dy)
                elif column:
                    function.forward(context, x, w, None, call)
                else:
                    function.forward(context, x, w, call)
        devices.append(device)
    return devices


@dataclass(frozen=True)
class Times:
    """Seconds on the model: the makespan with one and with eight hardware queues, and their parts on one rank.

    Attributes:
        compute: all kernels in turn, on an idle device.
        communication: all calls of messages in turn; of copy engines with the flags that follow.
        piece: the longest call of messages that a rank sends, which no order hides. Sums of an all-reduce, which the
            ranks copy from each other, are none.
    """

    one: float
    eight: float
    compute: float
    communication: float
    piece: float

    @property
    def bound(self) -> float:
        """The longest makespan that counts as overlapped."""
        return 1.1 * max(self.compute, self.communication) + self.piece


def is_message(copy: Op) -> bool:
    """Whether a batch of copies is between two ranks."""
    return all(of != to for of, to in copy.label)


def sent_bytes(device: Recorder) -> float:
    """Bytes of the messages of a rank."""
    copied = sum(op.label.total() for op in device.ops if op.kind == "copy" and is_message(op))
    return copied + sum(op.tensors[each].nbytes for op in device.ops for each in op.sends)


def times(devices: list[Recorder]) -> Times:
    """Play recorded devices."""
    ops = devices[0].ops
    work = [op.seconds for op in ops if op.kind == "work"]
    sent = [GPU.message_s(sum(op.tensors[each].nbytes for each in op.sends)) for op in ops if op.sends]
    copied = list[float]()
    for op in ops:
        if op.kind == "copy" and is_message(op):
            seconds = op.seconds + GPU.word_s * len(op.label)
            (sent if {of for of, _ in op.label} == {devices[0].rank} else copied).append(seconds)
    one, eight = (makespan(devices, GPU, connections=number) for number in (1, None))
    return Times(one, eight, sum(work), sum(sent) + sum(copied), max(sent))


def record_messages_first(patch: pytest.MonkeyPatch, case: Case) -> list[Recorder]:
    """`record` over NCCL, with the messages of an all-gather before its first GEMM."""
    with patch.context() as messages_first:
        placed = gather_scatter._placed

        def at_once(messages: list[Message], work: list[Any], **options: Any) -> tuple[Message, ...]:
            return tuple(replace(message, not_before=0) for message in placed(messages, work, **options))

        messages_first.setattr(gather_scatter, "_placed", at_once)
        p2p._schedule.cache_clear()
        devices = record(patch, case)
    p2p._schedule.cache_clear()
    return devices


def record_userbuffers(case: Case) -> list[Recorder]:
    """Pipelines with the default methods of TransformerEngine 2: for each rank, its GEMMs and its messages.

    Gathers before a GEMM: a ring of copies, a GEMM for each slice (`ring_exchange`). Scatters after a GEMM: a
    collective for each of four slices (`pipeline`). Backward of a column-parallel layer: a collective beside each of
    its GEMMs (`bulk`). Source: `initialize_ub` in `transformer_engine/pytorch/module/base.py`.
    """
    model, column = MODELS[case.model], LAYERS[case.layer] == "column"
    hidden, features, rows = model.hidden, model.features(case.layer) // RANKS, case.rows
    devices = [Recorder(rank, RANKS) for rank in range(RANKS)]
    for device in devices:
        link = SimpleNamespace(name="copies")

        def gemm(m: int, n: int, k: int, device: Recorder = device) -> None:
            device.put("work", "mm", seconds=GPU.gemm_s(m, n, k), uses_sms=True)

        def collective(rows: int, device: Recorder = device) -> Any:
            following, preceding = (device.rank + 1) % RANKS, (device.rank - 1) % RANKS
            moved = torch.empty((RANKS - 1) * rows // RANKS, hidden, device="meta", dtype=torch.bfloat16)
            group = NcclGroup(device)
            group.send([moved], following, 0)
            group.recv([moved], preceding, 0)
            return group._end_coalescing(None)

        def ring(n: int, device: Recorder = device, link: Any = link) -> None:
            shard = rows // RANKS
            for number in range(RANKS):
                with device.on(link):
                    if number:
                        device.put("reach", ((device.rank, number), 1))
                    if number < RANKS - 1:
                        following = (device.rank + 1) % RANKS
                        moved = Counter({(device.rank, following): 2 * shard * hidden})
                        device.put("copy", moved, seconds=GPU.message_s(moved.total()))
                        device.put("set", ((following, number + 1), 1), seconds=GPU.word_s)
                if number:
                    device.put("reach", ((device.rank, number), 1))
                gemm(shard, n, hidden)

        if not column and case.direction == "forward":
            slices = [(gemm(rows // 4, hidden, features), collective(rows // 4))[1] for _ in range(4)]
            slices[-1].wait()
        elif column and case.direction == "backward":
            gather = collective(rows)
            gemm(rows, hidden, features)
            gather.wait()
            scatter = collective(rows)
            gemm(features, hidden, rows)
            scatter.wait()
        else:
            ring(features)
            if case.direction == "backward":
                gemm(hidden, features, rows)
    return devices


def main() -> None:
    """Print the table."""
    print("A model of a GPU, in us. It compares orders of the same work and predicts no time of a real GPU.\n")
    columns = "compute | messages | bound | 1 queue | 8 queues"
    names = ["messages first, 1 queue", "userbuffers-like, 1 queue", *(f"{name}: {columns}" for name in TRANSPORTS)]
    print("| layer | " + " | ".join(names) + " |")
    print("|---" * (3 + 5 * len(TRANSPORTS)) + "|")
    for case in CASES:
        with pytest.MonkeyPatch.context() as patch:
            others = [record_messages_first(patch, case), record_userbuffers(case)]
            both = [times(record(patch, case, name)) for name in TRANSPORTS]
        cells = [makespan(devices, GPU, connections=1) for devices in others]
        cells += [value for t in both for value in (t.compute, t.communication, t.bound, t.one, t.eight)]
        print(f"| {case} | " + " | ".join(f"{1e6 * value:.0f}" for value in cells) + " |", flush=True)
    print(f"\nAll-reduces, without sequence parallelism:\n\n| layer | copies: {columns} |\n" + "|---" * 6 + "|")
    for case in PLAIN_CASES:
        with pytest.MonkeyPatch.context() as patch:
            took = times(record(patch, case, "copies"))
        plain = (took.compute, took.communication, took.bound, took.one, took.eight)
        print(f"| {case} | " + " | ".join(f"{1e6 * value:.0f}" for value in plain) + " |", flush=True)


if __name__ == "__main__":
    main()
