"""What the workers run: an MLP by parts of its rows, against the two layers one after the other, in float64 too."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as recompute

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import LayerOptions, LinearPlan, mlp_all_reduce, reference
from megatron_overlap.ops.wgrad import DeferredWgrad
from tests.helpers.late import LateTransport
from tests.helpers.numerics import assert_close_to_exact

K, F, H = 24, 20, 17


def _data(group: dist.ProcessGroup, rows: int, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Input, both weights, the first bias and the output gradient."""
    own = torch.Generator().manual_seed(seed * 64 + 1 + dist.get_rank(group))
    same = torch.Generator().manual_seed(seed * 64)
    x, dy = (torch.randn(rows, 1, width, generator=same).to(dtype) for width in (K, H))
    w1, w2 = torch.randn(2 * F, K, generator=own), torch.randn(H, F, generator=own)
    bias = torch.randn(2 * F, generator=own)
    return [x, *(tensor.to(dtype) for tensor in (w1, w2, bias)), dy]


def _glu(bias: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    gate, up = (y + bias).chunk(2, dim=-1)
    return functional.relu(gate) * up


def _reference(data: list[torch.Tensor], group: dist.ProcessGroup) -> list[torch.Tensor]:
    *tensors, dy = data
    x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in tensors)
    y = reference.mlp_all_reduce(x, w1, w2, lambda y: _glu(bias, y), group=group)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in (x, w1, w2, bias))]  # type: ignore[list-item]


def against_reference(
    group: dist.ProcessGroup,
    rows: int,
    dtype: torch.dtype,
    plan: LinearPlan,
    *,
    late: bool,
    main_grad: bool = False,
    deferred_wgrad: bool = False,
    checkpoint: bool = False,
) -> bytes:
    """Output and every gradient against the reference; the bits of what every rank must have alike."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    bits = b""
    for seed in (1, 2):
        data = _data(group, rows, dtype, seed)
        plain = _reference(data, group)
        exact = _reference([tensor.double() for tensor in data], group)
        x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in data[:-1])
        into = [torch.ones(w.shape, dtype=torch.float32) if main_grad else None for w in (w1, w2)]

        def mlp(x: torch.Tensor, w1: Any = w1, w2: Any = w2, bias: Any = bias, into: Any = into) -> torch.Tensor:
            return mlp_all_reduce(
                x,
                w1,
                w2,
                partial(_glu, bias),
                group=transport,
                plan=plan,
                first=LayerOptions(into[0]),
                second=LayerOptions(into[1]),
                deferred_wgrad=DeferredWgrad() if deferred_wgrad else None,
            )

        y = recompute(mlp, x, use_reentrant=True) if checkpoint else mlp(x)
        y.backward(data[-1])
        if main_grad:
            assert w1.grad is None
            assert w2.grad is None
        wgrads = [w.grad if grad is None else grad - 1 for w, grad in zip((w1, w2), into, strict=True)]
        got = [y.detach(), x.grad, *wgrads, bias.grad]
        for name, mine, unfused, true in zip(("y", "dx", "dw1", "dw2", "dbias"), got, plain, exact, strict=True):
            assert mine is not None
            # Ranks, rows and features are few: the largest of the values bounds what each is summed from.
            assert_close_to_exact(f"mlp {name}", mine, unfused, true, true.abs().max() * torch.ones_like(true), 64)
        bits += y.detach().float().numpy().tobytes() + x.grad.float().numpy().tobytes()  # type: ignore[union-attr]
    if late:
        transport.close()
    return bits


def order(group: dist.ProcessGroup) -> list[str]:
    """What one rank does in forward, in order, when nothing lands before it is waited for."""
    data = _data(group, 64, torch.float32, 1)
    did: list[str] = []
    transport = LateTransport(group)

    def between(y: torch.Tensor) -> torch.Tensor:
        did.append(f"{y.shape[0]} rows")
        return functional.relu(y[..., :F])

    first = LayerOptions(observer=lambda direction, num_bytes: did.append(f"first {direction} {num_bytes}"))
    second = LayerOptions(observer=lambda direction, num_bytes: did.append(f"second {direction} {num_bytes}"))
    x, w1, w2 = (tensor.requires_grad_() for tensor in data[:3])
    plan = LinearPlan(chunks_per_rank=4)
    y = mlp_all_reduce(x, w1, w2, between, group=transport, plan=plan, first=first, second=second)
    y.backward(data[-1])
    transport.close()
    return did


def frozen(group: dist.ProcessGroup, which: int) -> list[bool]:
    """One of input, weights and bias needs no gradient: which gradients were made, all equal to the reference."""
    data = _data(group, 12, torch.float32, 3)
    expected = _reference(data, group)[1:]
    leaves = [tensor.clone().requires_grad_(number != which) for number, tensor in enumerate(data[:-1])]
    x, w1, w2, bias = leaves
    y = mlp_all_reduce(x, w1, w2, lambda y: _glu(bias, y), group=group, plan=LinearPlan(chunks_per_rank=3))
    y.backward(data[-1])
    for leaf, wanted in zip(leaves, expected, strict=True):
        if leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, wanted, rtol=1e-4, atol=1e-4)
    return [leaf.grad is not None for leaf in leaves]


def kept_bytes(group: dist.ProcessGroup) -> list[int]:
    """Bytes that autograd keeps: by parts, and by layers."""
    sizes = []
    for by_parts in (True, False):
        x, w1, w2, bias, _ = (tensor.requires_grad_() for tensor in _data(group, 16, torch.float32, 1))
        kept: dict[int, int] = {}

        def pack(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.data_ptr()] = max(kept.get(tensor.data_ptr(), 0), tensor.nbytes)
            return tensor

        function = mlp_all_reduce if by_parts else reference.mlp_all_reduce
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y = function(x, w1, w2, lambda y, bias=bias: _glu(bias, y), group=group)  # type: ignore[operator]
        sizes.append(sum(kept.values()))
        y.sum().backward()
    return sizes


def refused(group: dist.ProcessGroup) -> list[str]:
    """What is said of operands that do not fit, before anything is sent."""
    x, w1, w2, _, _ = _data(group, 8, torch.float32, 1)
    texts = []
    for tensors, plan in (
        ((x[..., :-1], w1, w2), None),
        ((x[:0], w1, w2), None),
        ((x, w1, w2), LinearPlan(pattern="ring")),
    ):
        try:
            mlp_all_reduce(*tensors, lambda y: y, group=group, plan=plan)
        except ValueError as error:
            texts.append(str(error))
    return texts
