"""The methods that node.py compares. Each is a linear layer of all ranks, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.comm import transport_of
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.cuda import open_backend, open_copies
from megatron_overlap.comm.symmetric.transport import SymmetricTransport
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan, Hopper
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod, inside_host, open_fused
from megatron_overlap.ops.tensor_parallel.method import LinearMethod
from megatron_overlap.ops.tensor_parallel.p2p import LinearPlan, P2PMethod
from scripts.kernels.cpu_backend import CpuBackend

Linear = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]
"""`linear(op, x, w)`, differentiable. `ag`: `all_gather(x) @ w.T`; `rs`: `reduce_scatter(x @ w.T)`."""
OLDEST_NCCL = 2, 28
"""The first release whose collectives can use copy engines."""
FAILURES = RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ImportError, OSError
"""What methods raise where a machine cannot run them."""


class UnavailableError(Exception):
    """The reason why this machine cannot run a method."""


class Node:
    """The ranks of this node, each with a GPU; in a dry run each a process on the CPU."""

    def __init__(self, group: dist.ProcessGroup, dry: bool) -> None:
        self.group, self.dry = group, dry
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cpu") if dry else torch.device("cuda", torch.cuda.current_device())
        # The interpreter truncates bf16 where a GPU rounds.
        self.dtype = torch.float16 if dry else torch.bfloat16
        self.host = HostGroup(group, timeout_s=120.0, name="benchmark")

    def first_text(self, text: str) -> str:
        """Return the first text of any rank that is not empty, on all ranks. Collective."""
        return next((f"rank {rank}: {each}" for rank, each in enumerate(self.host.all_gather_text(text)) if each), "")

    @cached_property
    def peers(self) -> str:
        """Why the ranks cannot address each other's memory; empty if they can. Collective."""
        opened = "" if self.dry else open_backend(self.group)
        if isinstance(opened, str):
            return opened
        opened[0].close()
        return ""

    @cached_property
    def fused(self) -> Any:
        """The transport of fused operations, or why there is none. Collective."""
        if self.dry:
            from megatron_overlap.kernels.primitives import wait_all

            return SymmetricTransport(CpuBackend(HostGroup(self.group)), wait_all)
        return open_fused(self.group, transport_of)


class Collectives:
    """All-gather and reduce-scatter of rows over a group, each into a new tensor."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    def gather(self, shard: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor of all rows, and the work after which it is complete."""
        full = shard.new_empty(shard.shape[0] * self.size, shard.shape[1])
        return full, dist.all_gather_into_tensor(full, shard, group=self.group, async_op=True)

    def scatter(self, full: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor of the own rows of the sum, and the work after which it is complete."""
        own = full.new_empty(full.shape[0] // self.size, full.shape[1])
        return own, dist.reduce_scatter_tensor(own, full, group=self.group, async_op=True)


class CopyEngineGather(Collectives):
    """All-gather by NCCL's copy-engine collectives, in registered memory. A reduce-scatter adds and uses SMs.

    NCCL does not report where it uses a kernel instead; the number of SMs in the figures shows it.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node.group)
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        self._group = dist.new_group(backend="nccl", pg_options=options, device_id=node.device)
        backend: Any = self._group._get_backend(node.device)
        self._pool = torch.cuda.MemPool(backend.mem_allocator)
        backend.register_mem_pool(self._pool, symm=True)
        self._full: dict[tuple[int, ...], torch.Tensor] = {}

    def gather(self, shard: torch.Tensor) -> tuple[torch.Tensor, Any]:
        key = tuple(shard.shape)
        if key not in self._full:
            with torch.cuda.use_mem_pool(self._pool):
                self._full[key] = shard.new_empty(shard.shape[0] * self.size, shard.shape[1])
        full = self._full[key]
        own = full[self.rank * shard.shape[0] : (self.rank + 1) * shard.shape[0]]
        own.copy_(shard)
        return full, dist.all_gather_into_tensor(full, own, group=self._group, async_op=True)


class CollectiveLinear(torch.autograd.Function):
    """A linear layer in the order of Megatron.

    Forward and the gather of a row-parallel backward wait. A column-parallel backward gathers beside dgrad and scatters
    beside the weight gradient.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, op: str, collectives: Collectives) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.op, ctx.collectives = op, collectives
        if op == "rs":
            own, work = collectives.scatter(x @ w.t())
            work.wait()
            return own
        full, work = collectives.gather(x)
        work.wait()
        return full @ w.t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), dy, collectives = ctx.saved_tensors, grads[0].contiguous(), ctx.collectives
        if ctx.op == "rs":
            full, work = collectives.gather(dy)
            work.wait()
            return full @ w, full.t() @ x, None, None
        full, gathered = collectives.gather(x)
        dx_full = dy @ w
        gathered.wait()
        dx, scattered = collectives.scatter(dx_full)
        dw = dy.t() @ full
        scattered.wait()
        return dx, dw, None, None


class TorchFusedLinear(torch.autograd.Function):
    """A linear layer by torch's fused operations.

    A column-parallel backward gathers beside dgrad, as `CollectiveLinear` does. The weight gradient of a row-parallel
    layer uses the rows that dgrad has gathered.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, op: str, fused: TorchFused) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.op, ctx.fused = op, fused
        return fused.scatter(x, w.t()) if op == "rs" else fused.gather(x, w.t())[1]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x, w), dy, fused = ctx.saved_tensors, grads[0].contiguous(), ctx.fused
        if ctx.op == "rs":
            full, dx = fused.gather(dy, w)
            return dx, full.t() @ x, None, None
        full, gathered = fused.collectives.gather(x)
        dx = fused.scatter(dy, w)
        gathered.wait()
        return dx, dy.t() @ full, None, None


class TorchFused:
    """torch's `fused_all_gather_matmul` and `fused_matmul_reduce_scatter`; in a dry run the fallbacks of both."""

    def __init__(self, node: Node) -> None:
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        self.collectives, self._name = Collectives(node.group), node.group.group_name
        if node.dry:
            self._gather, self._scatter = (
                symmetric._fused_all_gather_matmul_fallback,
                symmetric._fused_matmul_reduce_scatter_fallback,
            )
        else:
            self._gather = torch.ops.symm_mem.fused_all_gather_matmul
            self._scatter = torch.ops.symm_mem.fused_matmul_reduce_scatter

    def gather(self, shard: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all rows and their product with `b`."""
        full, products = self._gather(shard, [b], 0, self._name)
        return full, products[0]

    def scatter(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """Return the own rows of the sum of `a @ b`."""
        own: torch.Tensor = self._scatter(a, b, "sum", 0, self._name)
        return own


class ModuleLinear(torch.autograd.Function):
    """Runs a module that owns its weight as a function of `x` and `w`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, module: Any) -> torch.Tensor:
        module.weight.data, module.weight.grad = w.detach(), None
        ctx.module, ctx.x = module, x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.y = module(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.y.backward(grads[0])
        return ctx.x.grad, ctx.module.weight.grad, None


class Userbuffers:
    """TransformerEngine's `Linear` with userbuffers, with the options that Megatron's `--tp-comm-overlap` sets."""

    def __init__(self, node: Node) -> None:
        self._te: Any = importlib.import_module("transformer_engine.pytorch")
        self._base: Any = importlib.import_module("transformer_engine.pytorch.module.base")
        self._node = node
        self._buffer: tuple[int, int] | None = None
        self._modules: dict[tuple[Any, ...], Any] = {}

    def __call__(self, op: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        gathers, size = op == "ag", self._node.size
        buffer = (x.shape[0] * size, x.shape[1]) if gathers else (x.shape[0], w.shape[0])
        if buffer != self._buffer:
            if self._buffer is not None:
                self._base.destroy_ub()
                self._modules.clear()
            self._base.initialize_ub(list(buffer), size, dtype=x.dtype, bootstrap_backend="nccl")
            self._buffer = buffer
        key = op, *w.shape
        if key not in self._modules:
            flags = {"ub_overlap_ag": True, "ub_name": "fc1" if gathers else "fc2"}
            flags |= {"ub_bulk_dgrad": True, "ub_bulk_wgrad": True} if gathers else {"ub_overlap_rs": True}
            self._modules[key] = self._te.Linear(
                w.shape[1] if gathers else w.shape[1] * size,
                w.shape[0] * size if gathers else w.shape[0],
                bias=False,
                parallel_mode="column" if gathers else "row",
                sequence_parallel=True,
                tp_group=self._node.group,
                tp_size=size,
                params_dtype=x.dtype,
                **flags,
            )
        y: torch.Tensor = ModuleLinear.apply(x, w, self._modules[key])
        return y


def _stock(node: Node) -> Linear:
    collectives = Collectives(node.group)
    return lambda op, x, w: CollectiveLinear.apply(x, w, op, collectives)


def _userbuffers(node: Node) -> Linear:
    if node.dry:
        raise UnavailableError("transformer_engine needs CUDA")
    try:
        return Userbuffers(node)
    except ImportError as error:
        raise UnavailableError(f"transformer_engine cannot be imported: {error}") from error


def _torch_fused(node: Node) -> Linear:
    if node.peers:
        raise UnavailableError(node.peers)
    fused = TorchFused(node)
    return lambda op, x, w: TorchFusedLinear.apply(x, w, op, fused)


def _nccl_copies(node: Node) -> Linear:
    if node.dry:
        raise UnavailableError("copy-engine collectives need NCCL; a dry run uses gloo")
    version: tuple[int, ...] = torch.cuda.nccl.version()
    if version < OLDEST_NCCL:
        raise UnavailableError(f"NCCL {'.'.join(map(str, version))}: copy-engine collectives need 2.28")
    if not hasattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO"):
        raise UnavailableError(f"torch {torch.__version__} cannot request copy-engine collectives")
    collectives = CopyEngineGather(node)
    return lambda op, x, w: CollectiveLinear.apply(x, w, op, collectives)


def _linear_of(method: LinearMethod) -> Linear:
    def linear(op: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (all_gather_linear if op == "ag" else linear_reduce_scatter)(x, w, group=method)

    return linear


def _p2p(node: Node) -> Linear:
    return _linear_of(P2PMethod(transport_of(node.group), LinearPlan()))


def _p2p_copies(node: Node) -> Linear:
    if node.dry:
        return _linear_of(P2PMethod(CopyTransport(CpuBackend(HostGroup(node.group))), LinearPlan()))
    transport = open_copies(node.group)
    if isinstance(transport, str):
        raise UnavailableError(transport)
    return _linear_of(P2PMethod(transport, LinearPlan()))


def _fused(plan: dict[str, Any], node: Node) -> Linear:
    if isinstance(node.fused, str):
        raise UnavailableError(node.fused)
    if plan.get("kernel") == "hopper" and (reason := Hopper.of(inside_host(node.fused)).unsupported_reason):
        raise UnavailableError(reason)
    return _linear_of(FusedMethod(node.fused, FusedPlan(**plan, **({"chunk_rows": 8} if node.dry else {}))))


METHODS: dict[str, Callable[[Node], Linear]] = {
    "stock": _stock,
    "userbuffers": _userbuffers,
    "torch fused": _torch_fused,
    "nccl copies": _nccl_copies,
    "p2p": _p2p,
    "p2p copies": _p2p_copies,
    "fused": partial(_fused, {}),
    "fused pull": partial(_fused, {"mover": "pull"}),
    "fused ring": partial(_fused, {"mover": "ring"}),
    "fused staged": partial(_fused, {"stores": "staged"}),
    "fused hopper": partial(_fused, {"kernel": "hopper"}),
}
"""Each opens a method on all ranks, or raises `UnavailableError`. `stock` is NCCL's collectives and cuBLAS."""


def open_method(name: str, node: Node) -> Linear | str:
    """Return the method, or why a rank cannot run it. Collective: all ranks return the same reason."""
    linear, reason = None, ""
    try:
        linear = METHODS[name](node)
    except UnavailableError as error:
        reason = str(error)
    except FAILURES as error:
        reason = text_of(error)
    reasons = node.host.all_gather_text(reason)
    if any(reasons):
        return next(each for each in reasons if each)
    assert linear is not None
    return linear


def text_of(error: BaseException) -> str:
    """Type and first line of an error."""
    return f"{type(error).__name__}: {(str(error) or 'no text').splitlines()[0][:300]}"


def broken(linear: Linear) -> Linear:
    """A method whose result and gradients are wrong in one row: the check must notice it."""

    def wrong(op: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = linear(op, x, w)
        return torch.cat([y[:-1], 2 * y[-1:]])

    return wrong
