"""What the workers run: linear layers without sequence parallelism and their references on the same data."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint as recompute

from megatron_overlap.comm import transport_of
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.ops import LinearPlan, copy_linear, linear_all_reduce, linear_reduce_scatter, reference
from megatron_overlap.ops.tensor_parallel.fused.kernels import FusedPlan
from megatron_overlap.ops.tensor_parallel.fused.linear import FusedMethod
from megatron_overlap.ops.wgrad import DeferredWgrad
from tests.helpers.collectives import device_copies
from tests.helpers.fused import fused_transport
from tests.helpers.late import LateTransport
from tests.helpers.numerics import assert_close_to_exact

OPS = {
    "linear_all_reduce": (linear_all_reduce, reference.linear_all_reduce),
    "copy_linear": (copy_linear, reference.copy_linear),
}


def _data(group: dist.ProcessGroup, op: str, rows: int, k: int, f: int, dtype: torch.dtype, seed: int) -> Any:
    """Input, weight, bias and output gradient: the same on all ranks where the op says that they are."""
    own = torch.Generator().manual_seed(seed * 64 + 1 + dist.get_rank(group))
    same = torch.Generator().manual_seed(seed * 64)
    of_x, of_bias, of_dy = (own, same, same) if op == "linear_all_reduce" else (same, own, own)
    x = torch.randn(rows, k, generator=of_x).to(dtype)
    w = torch.randn(f, k, generator=own).to(dtype)
    bias = torch.randn(f, generator=of_bias).to(dtype)
    dy = torch.randn(rows, f, generator=of_dy).to(dtype)
    return x, w, bias, dy


def _reference(op: str, x: Any, w: Any, bias: Any, dy: Any, group: dist.ProcessGroup) -> list[torch.Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
    y = OPS[op][1](*leaves, group=group)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def against_reference(
    group: dist.ProcessGroup,
    op: str,
    rows: int,
    k: int,
    f: int,
    dtype: torch.dtype,
    plan: LinearPlan | FusedPlan,
    *,
    late: bool,
    main_grad: bool = False,
    seed: int = 1,
    repeats: int = 2,
    hosts: int = 1,
    copies: bool = False,
) -> bytes:
    """Output and every gradient against the reference; the bits of what every rank must have alike.

    With `copies` the calls run as on a device with copy engines.
    """
    fused = isinstance(plan, FusedPlan)
    transport: Any = fused_transport(group, hosts) if fused else LateTransport(group) if late else transport_of(group)
    if copies:
        transport = device_copies(HostGroup(group))
    size = dist.get_world_size(group)
    bits = b""
    for repeat in range(repeats):
        x, w, bias, dy = _data(group, op, rows, k, f, dtype, seed + repeat)
        unfused = _reference(op, x, w, bias, dy, group)
        exact = _reference(op, *(tensor.double() for tensor in (x, w, bias, dy)), group)
        size_of = _reference(op, *(tensor.double().abs() for tensor in (x, w, bias, dy)), group)
        leaves = [tensor.clone().requires_grad_() for tensor in (x, w, bias)]
        # Not contiguous, as what a transpose or a narrow leaves behind.
        leaves[0] = torch.stack([x, x], dim=-1)[..., 0].requires_grad_()
        into = torch.ones(f, k, dtype=torch.float32) if main_grad else None
        how: Any = {"group": FusedMethod(transport, plan)} if fused else {"group": transport, "plan": plan}
        y = OPS[op][0](*leaves, main_grad=into, **how)
        y.backward(torch.stack([dy, dy], dim=-1)[..., 0])
        wgrad = leaves[1].grad
        if into is not None:
            assert wgrad is None
            wgrad = into - 1
            # 1 was there before: what is rounded away of it counts too.
            size_of[2] = size_of[2] + 1
        got = [y.detach(), leaves[0].grad, wgrad, leaves[2].grad]
        summed = op == "linear_all_reduce"
        terms = {"y": k * (size if summed else 1), "dx": f * (1 if summed else size), "dw": rows, "dbias": rows}
        for name, mine, plain, true, magnitude in zip(terms, got, unfused, exact, size_of, strict=True):
            assert mine is not None
            assert_close_to_exact(f"{op} {name}", mine, plain, true, magnitude, terms[name])
        alike = got[0] if summed else got[1]
        assert alike is not None
        bits += alike.float().numpy().tobytes()
    if copies:
        dist.barrier(group)
    if late or fused or copies:
        transport.close()
    return bits


def random_calls(group: dist.ProcessGroup, seed: int, count: int) -> bytes:
    """Calls with shapes, dtypes, patterns, cuts and lateness drawn from `seed`, the same on all ranks."""
    draw = random.Random(seed)
    bits = b""
    for _ in range(count):
        bits += against_reference(
            group,
            draw.choice(list(OPS)),
            draw.choice([0, 1, 2, 3, 7, 16, 33, 64]),
            draw.choice([1, 5, 16, 31]),
            draw.choice([1, 3, 40, 300]),
            draw.choice([torch.float32, torch.bfloat16]),
            LinearPlan(
                pattern=draw.choice(["direct", "direct", "serial"]),
                chunks_per_rank=draw.choice([None, 1, 2, 3, 5]),
                split=draw.choice([None, "edge", "all"]),
                add_in_place=draw.choice([None, True]),
            ),
            late=draw.random() < 0.5,
            main_grad=draw.random() < 0.3,
            seed=draw.randrange(1000),
            repeats=1,
        )
    return bits


def sum_is_rounded_once(group: dist.ProcessGroup) -> bool:
    """1 + three times what bf16 cannot add to 1 one by one, but together."""
    rank, eps = dist.get_rank(group), torch.finfo(torch.bfloat16).eps
    x = torch.eye(8, dtype=torch.bfloat16)
    w = torch.full((8, 8), 1.0 if rank == 0 else eps / 2, dtype=torch.bfloat16)
    y = linear_all_reduce(x, w, group=group, plan=LinearPlan(chunks_per_rank=2))
    # 1 + 1.5 eps is half-way between 1 + eps and 1 + 2 eps; ties go to even.
    return torch.equal(y, torch.full_like(y, 1 + 2 * eps))


def three_dimensions(group: dist.ProcessGroup) -> None:
    """[S, B, H] in, [S, B, H] out, as Megatron's layers; a sequence need not divide."""
    y = copy_linear(torch.ones(3, 2, 8), torch.randn(5, 8), torch.randn(5), group=group)
    assert y.shape == (3, 2, 5)
    assert linear_all_reduce(y, torch.randn(8, 5), torch.randn(8), group=group).shape == (3, 2, 8)


def frozen(group: dist.ProcessGroup, op: str, which: str) -> list[bool]:
    """Backward with a weight, or an input, that needs no gradient; which gradients were made."""
    x, w, bias, dy = _data(group, op, 12, 8, 6, torch.float32, 3)
    expected = _reference(op, x, w, bias, dy, group)
    x.requires_grad_(which != "x")
    w.requires_grad_(which != "w")
    OPS[op][0](x, w, bias, group=group, plan=LinearPlan(chunks_per_rank=2)).backward(dy)
    for grad, plain in ((x.grad, expected[1]), (w.grad, expected[2])):
        assert grad is None or torch.allclose(grad, plain, rtol=1e-5, atol=1e-5)
    return [x.grad is not None, w.grad is not None]


def kept_bytes(group: dist.ProcessGroup, op: str, *, weight: bool) -> int:
    """Bytes of activations that autograd keeps for backward, weights left out."""
    x, w, _, _ = _data(group, op, 16, 8, 6, torch.float32, 1)
    x.requires_grad_()
    w.requires_grad_(weight)
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() != w.data_ptr():
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        OPS[op][0](x, w, group=group)
    return sum(kept.values())


def two_layers_recomputed(group: dist.ProcessGroup, *, checkpoint: bool) -> list[float]:
    """A column- and a row-parallel layer, with and without activation recomputation."""
    x, w1, _, _ = _data(group, "copy_linear", 8, 16, 24, torch.float32, 7)
    _, w2, _, _ = _data(group, "linear_all_reduce", 8, 24, 16, torch.float32, 8)
    for tensor in (x, w1, w2):
        tensor.requires_grad_()

    def block(hidden: torch.Tensor) -> torch.Tensor:
        plan = LinearPlan(chunks_per_rank=2)
        inner = torch.relu(copy_linear(hidden, w1, group=group, plan=plan))
        return linear_all_reduce(inner, w2, group=group, plan=plan)

    y = recompute(block, x, use_reentrant=False) if checkpoint else block(x)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    return [float(t.double().sum()) for t in (y, x.grad, w1.grad, w2.grad) if t is not None]


def passes(group: dist.ProcessGroup, op: str) -> list[tuple[str, int]]:
    """What the observer is told."""
    told: list[tuple[str, int]] = []
    x, w, _, dy = _data(group, op, 12, 8, 6, torch.float32, 1)
    x.requires_grad_()
    w.requires_grad_()
    y = OPS[op][0](x, w, group=group, observer=lambda direction, num_bytes: told.append((direction, num_bytes)))
    y.backward(dy)
    return told


def refused(group: dist.ProcessGroup) -> list[str]:
    """The messages for arguments that do not fit."""
    x, w = torch.zeros(4, 8), torch.zeros(6, 8)
    calls = [
        lambda: linear_all_reduce(torch.zeros(4, 9), w, group=group),
        lambda: linear_all_reduce(x.bfloat16(), w, group=group),
        lambda: linear_all_reduce(x, w, group=group, main_grad=torch.zeros(8, 6)),
        lambda: linear_all_reduce(x, w, group=group, plan=LinearPlan(pattern="ring")),
        lambda: copy_linear(x, w, torch.zeros(5), group=group),
    ]
    messages = []
    for call in calls:
        try:
            call()
        except ValueError as error:
            messages.append(str(error))
    return messages


def with_a_deferred_wgrad(group: dist.ProcessGroup, *, checkpoint: bool, main_grad: bool, late: bool) -> list[str]:
    """Two layers, each a column and a row, with and without a deferred_wgrad: the same bits; the order of what is
    done."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    plain, _ = _two_layers(transport, None, checkpoint=checkpoint, main_grad=main_grad)
    deferred_wgrad = DeferredWgrad()
    put_off, did = _two_layers(transport, deferred_wgrad, checkpoint=checkpoint, main_grad=main_grad)
    for one, other in zip(plain, put_off, strict=True):
        assert torch.equal(one, other)
    assert not deferred_wgrad.take()
    if late:
        transport.close()
    return did


def _two_layers(
    transport: Any, deferred_wgrad: DeferredWgrad | None, *, checkpoint: bool, main_grad: bool
) -> tuple[list[torch.Tensor], list[str]]:
    """Gradients of the input and of four weights; every all-reduce and weight gradient of backward in order."""
    same, own = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + transport.rank)
    x = torch.randn(6, 8, generator=same).requires_grad_()
    weights = [torch.randn(*shape, generator=own).requires_grad_() for shape in ((12, 8), (8, 12)) * 2]
    totals = [torch.ones_like(weight) if main_grad else None for weight in weights]
    did: list[str] = []
    for number, weight in enumerate(weights):
        weight.register_post_accumulate_grad_hook(lambda _, number=number: did.append(f"weight {number}"))

    def linear(number: int, rows: torch.Tensor) -> torch.Tensor:
        return (linear_all_reduce if number % 2 else copy_linear)(
            rows,
            weights[number],
            group=transport,
            main_grad=totals[number],
            weight_done=lambda: torch.zeros_like(weights[number]),
            observer=lambda direction, _: did.append(f"{direction} {number}"),
            deferred_wgrad=deferred_wgrad,
        )

    def layer(number: int, rows: torch.Tensor) -> torch.Tensor:
        return rows + linear(number + 1, torch.nn.functional.gelu(linear(number, rows)))

    y = x
    for number in (0, 2):
        y = recompute(layer, number, y, use_reentrant=True) if checkpoint else layer(number, y)
    did.clear()
    y.sum().backward()
    gradients = [
        x.grad,
        *(weight.grad if total is None else total for weight, total in zip(weights, totals, strict=True)),
    ]
    return [gradient for gradient in gradients if gradient is not None], [
        each for each in did if each.startswith(("weight", "dgrad"))
    ]


def a_row_without_a_column(group: dist.ProcessGroup) -> list[list[float]]:
    """Nobody takes what it has put off: the gradient is there when the pass is over, of each of two passes."""
    deferred_wgrad = DeferredWgrad()
    w = torch.zeros(1, 1, requires_grad=True)
    seen = []
    for _ in range(2):
        linear_all_reduce(torch.full((3, 1), 2.0), w, group=group, deferred_wgrad=deferred_wgrad).sum().backward()
        assert w.grad is not None
        seen.append(w.grad.flatten().tolist())
    return seen


def skipped_output(group: dist.ProcessGroup, op: str) -> tuple[bool, bool, list[tuple[str, int]]]:
    """With `skip_output`: whether the output is NaN, whether the gradients are those of a computed one, the passes."""
    function = linear_reduce_scatter if op == "linear_reduce_scatter" else linear_all_reduce
    gradients: list[list[torch.Tensor | None]] = []
    passes: list[tuple[str, int]] = []
    for skip in (False, True):
        generator = torch.Generator().manual_seed(3 + dist.get_rank(group))
        leaves = [torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((13, 8), (6, 8), (6,))]
        passes.clear()
        y = function(*leaves, group=group, observer=lambda *each: passes.append(each), skip_output=skip)
        y.backward(torch.ones(y.shape))
        gradients.append([each.grad for each in leaves])
    # Arrival decides how the weight gradient is cut, so its last bits differ from call to call.
    pairs = zip(*gradients, strict=True)
    equal = all(a is not None and b is not None and torch.allclose(a, b, rtol=1e-5, atol=1e-5) for a, b in pairs)
    return bool(y.isnan().all()), equal, passes
