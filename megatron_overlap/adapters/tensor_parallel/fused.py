"""Backend `fused`: GEMM kernels that read and write the symmetric memory of peers."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from megatron_overlap.adapters.tensor_parallel.call import LinearCall
from megatron_overlap.adapters.tensor_parallel.eligibility import CAPTURED
from megatron_overlap.autotune.candidates import FUSED, HOPPER, Candidate
from megatron_overlap.comm import Transport
from megatron_overlap.counters import SymmetricMemory
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan, Hopper
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod, FusedTransport, inside_host, open_fused
from megatron_overlap.ops.tensor_parallel.linear import LINEAR_OPS
from megatron_overlap.schedules.heuristics import Knob
from megatron_overlap.session import Session


class FusedTransports:
    """The symmetric memory of each group that has it. `messages` opens messages between nodes, as of `open_fused`."""

    def __init__(self, session: Session, messages: Callable[[dist.ProcessGroup], Transport]) -> None:
        self.hopper = session.config.tensor.kernels == "hopper"
        self._counters, self._messages = session.counters, messages
        self._transports: dict[dist.ProcessGroup, FusedTransport | str] = {}
        if session.config.tensor.method == "fused":
            self._counters.symmetric_memory = self.memory

    def open(self, group: dist.ProcessGroup) -> FusedTransport | str:
        """The fused transport of `group`, or the reason that it has none. The first call is collective."""
        transport = self._transports.get(group)
        if transport is None:
            transport = self._transports[group] = open_fused(group, self._messages)
            self._counters.symmetric_memory = self.memory
        return transport

    def memory(self) -> list[SymmetricMemory]:
        """Symmetric memory of each group whose calls ran fused."""
        opened = [(each.size, inside_host(each)) for each in self._transports.values() if not isinstance(each, str)]
        return [
            SymmetricMemory(size, inside.num_bytes, inside.bound_bytes, Hopper.reasons(inside))
            for size, inside in opened
            if inside.num_bytes
        ]

    def close(self) -> None:
        """Frees the symmetric memory of all groups."""
        for transport in self._transports.values():
            if not isinstance(transport, str):
                transport.close()
        self._transports.clear()


class FusedBackend:
    """Runs the fused operation of a call. `knobs` None uses the defaults of the configuration for the kernels."""

    def __init__(self, transports: FusedTransports, knobs: Sequence[Knob] | None = None) -> None:
        self._transports = transports
        if knobs is None:
            knobs = HOPPER.knobs if transports.hopper else ()
        self._plan = FusedPlan(**dict(knobs))  # type: ignore[arg-type]

    def unsupported_reason(self, call: LinearCall) -> str | None:
        rows, ranks = call.x[..., 0].numel(), call.group.size()
        reason = FusedMethod.unsupported_reason(call.x, rows * ranks if call.op == "ag_gemm" else rows, ranks)
        if reason is not None:
            return reason
        transport = self._transports.open(call.group)
        return transport if isinstance(transport, str) else None

    def unsupported_capture_reason(self, call: LinearCall) -> str | None:
        """See `P2PBackend`. Kernels compare flags with the epoch of their call, which a replay would repeat."""
        return f"{CAPTURED}: fused kernels cannot be replayed"

    def candidates(self, call: LinearCall) -> list[Candidate]:
        """Candidates of the autotuner. The first call for Hopper kernels tests them on the device."""
        if self.unsupported_reason(call) is not None:
            return []
        hopper = self._transports.hopper and not Hopper.of(inside_host(self._transport(call))).unsupported_reason
        return [FUSED, *([HOPPER] if hopper else [])]

    def output(self, call: LinearCall, *, checked: bool = False) -> torch.Tensor:
        return LINEAR_OPS[call.op](
            call.x,
            call.weight,
            call.bias,
            group=FusedMethod(self._transport(call), self._plan),
            main_grad=call.main_grad,
            weight_done=call.weight_done,
            observer=call.hooks.overlapped,
        )

    def _transport(self, call: LinearCall) -> FusedTransport:
        transport = self._transports.open(call.group)
        assert not isinstance(transport, str)
        return transport
