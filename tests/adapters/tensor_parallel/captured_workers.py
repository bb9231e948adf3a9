"""Captures Megatron's linear layers over copies on the host, forward and backward apart, and replays both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, Session, enable
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from tests.adapters.tensor_parallel.linear_workers import TENSOR, make_data, make_layer, start
from tests.comm.captured import CapturedBackend, Graph

SEQUENCE = 8
KINDS = ("column", "row")


@dataclass
class Job:
    """A session whose layers communicate by copies.

    Attributes:
        session: the session.
        adapter: of the linear layers.
        backend: symmetric memory of the host, whose queues `graph` captures.
        graph: see `Graph`.
    """

    session: Session
    adapter: Any
    backend: CapturedBackend
    graph: Graph

    def capture(self, step: Callable[[], list[torch.Tensor]]) -> tuple[list[torch.Tensor], Callable[[], None]]:
        """See `Graph.capture`. Megatron's layers see the capture too."""
        with in_a_graph():
            return self.graph.capture(self.backend.computing, step)


@contextmanager
def in_a_graph() -> Iterator[None]:
    """The context of a capture of calls on the CPU."""
    from megatron_overlap.adapters.tensor_parallel import eligibility

    with patch.object(eligibility, "is_capturing", lambda x: True):
        yield


@contextmanager
def copies(group: dist.ProcessGroup, tensor: dict[str, Any]) -> Iterator[Job]:
    """A session whose layers communicate by copies."""
    from megatron.core import parallel_state

    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter

    graph = Graph()
    backend = CapturedBackend(HostGroup(group), graph)
    transport = CopyTransport(backend)
    with enable(OverlapConfig(tensor=tensor), strict=True) as session:
        adapter = session.adapter(LinearAdapter)
        adapter.transports[parallel_state.get_tensor_model_parallel_group()] = transport
        yield Job(session, adapter, backend, graph)
        dist.barrier(group)
    transport.close()


class Layer:
    """One layer, with input and output gradient in static tensors."""

    def __init__(self, kind: str, group: dist.ProcessGroup, *, plain: bool = False) -> None:
        self._module = make_layer(kind, torch.float32, sequence_parallel=not plain)
        self.group = self._module.tp_group
        x, self.dy = make_data(kind, torch.float32, SEQUENCE, group.size(), group.rank(), parallel=not plain)
        self.x = x.requires_grad_()
        self._output = torch.empty(0)

    def forward(self) -> list[torch.Tensor]:
        """Returns the output."""
        self._output = self._module(self.x)[0]
        return [self._output.detach()]

    def backward(self) -> list[torch.Tensor]:
        """Returns the gradients of input, weight and bias, as Megatron's capture: None of a postponed one."""
        leaves = [self.x, self._module.weight, self._module.bias]
        return list(torch.autograd.grad(self._output, leaves, self.dy, allow_unused=True))

    def draw(self, generator: torch.Generator) -> None:
        """Writes new numbers to input and output gradient."""
        with torch.no_grad():
            for tensor in (self.x, self.dy):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))


def replay(
    group: dist.ProcessGroup, num_steps: int, tensor: dict[str, Any], plain: bool
) -> tuple[list[int], int, dict[str, int]]:
    """Replays forward and backward of both layers, each captured apart, and runs them without a graph.

    `plain` is without sequence parallelism: no weight gradient is postponed, as in a graph.

    Returns the steps with different bits, the number of steps of which every result differs from that of the step
    before, and the overlapped passes that the captures counted.
    """
    start(group)
    generator = torch.Generator().manual_seed(group.rank())
    with copies(group, tensor) as job:
        eager, static = ([Layer(kind, group, plain=plain) for kind in KINDS] for _ in range(2))
        passes = [layer.forward for layer in static], [layer.backward for layer in reversed(static)]

        def run(steps: list[Callable[[], list[torch.Tensor]]]) -> list[torch.Tensor]:
            return [tensor for step in steps for tensor in step()]

        for steps in passes:
            run(steps)  # Megatron runs the layers before it captures them, with the same static input
        before = _counts(job)
        graphs = [job.capture(lambda steps=steps: run(steps)) for steps in passes]
        counted = {name: number - before[name] for name, number in _counts(job).items()}
        results = [tensor for tensors, _ in graphs for tensor in tensors]
        different, num_changed, last = [], 0, [torch.empty(0)] * len(results)
        for number in range(num_steps):
            for layer, same in zip(static, eager, strict=True):
                layer.draw(generator)
                with torch.no_grad():
                    same.x.copy_(layer.x)
                    same.dy.copy_(layer.dy)
            for _, play in graphs:
                play()
            with in_a_graph() if plain else nullcontext():
                expected = run([layer.forward for layer in eager]) + run([layer.backward for layer in reversed(eager)])
            if not all(map(torch.equal, results, expected)):
                different.append(number)
            num_changed += not any(map(torch.equal, results, last))
            last = [result.clone() for result in results]
        return different, num_changed, counted


def _counts(job: Job) -> dict[str, int]:
    """The overlapped passes by operation and direction."""
    return {f"{site.op} {site.direction}": tally.overlapped for site, tally in job.session.report().sites.items()}


def reasons(group: dist.ProcessGroup) -> dict[str, list[str | None]]:
    """Why each kind of call is not captured: over gloo, over copies before a call of its shape and after it, fused."""
    from megatron_overlap.adapters.tensor_parallel.dispatch import FusedBackend

    start(group)
    found: dict[str, list[str | None]] = {}
    for kind in KINDS:
        with copies(group, TENSOR) as job:
            layer = Layer(kind, group)
            layer.forward()
            call = _call(job.adapter, layer)
            p2p, fused = job.adapter._p2p, FusedBackend(job.adapter._fused_transports)
            after = p2p.unsupported_capture_reason(call)
            p2p._capturable.clear()
            before = p2p.unsupported_capture_reason(call)
            job.adapter.transports.clear()
            unopened = p2p.unsupported_capture_reason(call)
            job.adapter.transport(call.group)
            gloo = p2p.unsupported_capture_reason(call)
            found[kind] = [after, before, unopened, gloo, fused.unsupported_capture_reason(call)]
    return found


def autotuned(group: dist.ProcessGroup) -> list[str]:
    """The candidates of captured calls under `method: auto`: before the first call of the kind, and with a selection.

    A measurement would end in an error: nothing is timed, and the ranks exchange nothing.
    """
    from megatron_overlap.adapters.tensor_parallel import dispatch
    from megatron_overlap.autotune.candidates import Candidate

    start(group)
    ran: list[str] = []
    run_stock = dispatch._run_stock
    with copies(group, {"method": "auto"}) as job:
        adapter, layer = job.adapter, Layer("column", group)
        candidate = Candidate("p2p", "direct", 1)
        backend = adapter._backend(candidate)
        output = backend.output
        backend.output = lambda call: ran.append("p2p") or output(call)
        tuner = adapter.autotuner
        selected = SimpleNamespace(search=SimpleNamespace(selected=SimpleNamespace(candidate=candidate)))
        with (
            patch.object(tuner, "run", side_effect=AssertionError("a captured call is measured")),
            patch.object(dispatch, "_run_stock", lambda call: ran.append("stock") or run_stock(call)),
        ):
            with in_a_graph():
                layer.forward()
            backend.output(_call(adapter, layer))  # a call outside a graph
            everything = SimpleNamespace(kinds=SimpleNamespace(get=lambda kind: selected))
            with patch.object(tuner, "_autotuners", {layer.group: everything}):
                job.capture(layer.forward)
    return ran


def _call(adapter: Any, layer: Layer) -> Any:
    """The call of a layer."""
    calls: list[Any] = []
    with patch.object(adapter, "run", lambda call, reason: calls.append(call) or call.run_stock()):
        layer.forward()
    return calls[0]


def settings_of_copies(group: dist.ProcessGroup) -> dict[str, bool]:
    """Whether the candidates of `method: auto` are those of copy engines, by operation."""
    from megatron.core import parallel_state

    from megatron_overlap.adapters.tensor_parallel import autotune
    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter

    start(group)
    found: dict[str, bool] = {}
    with enable(OverlapConfig(tensor={"method": "auto"})) as session:
        adapter: Any = session.adapter(LinearAdapter)
        group = parallel_state.get_tensor_model_parallel_group()
        adapter.transports[group] = SimpleNamespace(copy_engines=True)
        kind: Any = SimpleNamespace(rows=64, in_features=16, out_features=16, all_reduces=False)
        for op in ("ag_gemm", "gemm_rs", "copy_gemm", "gemm_ar"):
            call: Any = SimpleNamespace(group=group, op=op, x=torch.zeros(2, 2))
            with patch.object(autotune, "p2p_settings", return_value=[]) as settings:
                adapter.autotuner._p2p_candidates(call, kind)
            found[op] = settings.call_args.kwargs["copy_engines"]
    return found


def captured_over_gloo(group: dist.ProcessGroup, kind: str) -> list[str]:
    """The reasons of captured calls of a session whose messages gloo carries."""
    start(group)
    with enable(OverlapConfig(tensor=TENSOR)) as session:
        layer = Layer(kind, group)
        layer.forward()
        with in_a_graph():
            layer.forward()
        return [reason for tally in session.report().sites.values() for reason in tally.fallbacks]


def joint_operations(group: dist.ProcessGroup) -> list[str | None]:
    """The reasons of batch overlap, query split and experts during a capture, for tensors of a GPU without data."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from megatron_overlap.adapters.expert_parallel.experts import LayerExperts
    from megatron_overlap.adapters.tensor_parallel import attention_projection, batch_overlap

    start(group)
    counted: list[str] = []
    anything: Any = SimpleNamespace(weight=None, forward=None, hooks=(), attributes=(), fc1=(None,))
    joint = attention_projection._JointCall(anything, anything, anything)
    joint._adapter = SimpleNamespace(hooks=lambda *_: SimpleNamespace(fallback=counted.append))
    joint._core_forward = lambda *args: None
    with FakeTensorMode() as mode:
        x = FakeTensor(mode, torch.empty((4, 2, 16), device="meta"), torch.device("cuda:0"))
        with patch.object(torch.cuda, "is_current_stream_capturing", lambda: True):
            batch = batch_overlap._unsupported_reason(None, {"hidden_states": x}, anything, "batch")
            joint.core_attention(x, x, x, None)
            experts = LayerExperts.unsupported_reason(anything, x, group)
    return [batch, *counted, experts]
