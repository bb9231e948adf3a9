"""Weight gradients equal `dy.T @ x` for every destination, and reach their parameter once per backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from megatron_overlap.ops.wgrad import DeferredWgrad, Spans, WeightGradient, WgradTarget, add_terms
from tests.helpers.late import PoisonedPool

ROWS, FEATURES, IN_FEATURES = 12, 300, 16


def _operands(dtype: torch.dtype, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weight, output gradient and input."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (FEATURES, IN_FEATURES), (ROWS, FEATURES), (ROWS, IN_FEATURES)
    weight, dy, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return weight, dy, x


class _OnDevice(torch.Tensor):
    """A tensor of the host that says that it is on a GPU."""

    is_cuda = True


def test_torch_adds_terms_where_triton_launches_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU machine without a C compiler, or with a home directory that nothing can be written to."""
    monkeypatch.setattr("megatron_overlap.ops.wgrad.triton_unsupported_reason", lambda: "no C compiler")
    terms, own = torch.full((3, 2, 4), 2.0), torch.ones(2, 4)
    out = torch.zeros(2, 4).as_subclass(_OnDevice)
    assert add_terms(terms, own, out, 7) is out
    assert out.eq(1).all()


def _target(main_grad: torch.Tensor | None = None, weight_done: Any = None) -> WgradTarget:
    return WgradTarget(main_grad, weight_done, PoisonedPool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("with_main_grad", [False, True], ids=["autograd", "main_grad"])
def test_row_ranges_add_up(with_main_grad: bool, dtype: torch.dtype) -> None:
    weight, dy, x = _operands(dtype)
    main_grad = torch.ones(weight.shape) if with_main_grad else None
    wgrad = WeightGradient(weight, _target(main_grad))
    for rows in (slice(0, 3), slice(3, 7), slice(7, ROWS)):
        wgrad.add(dy[rows], x[rows])
    result = wgrad.result()
    exact = dy.double().t() @ x.double()
    if main_grad is not None:
        assert result is None
        result, exact = main_grad, exact + 1
    assert result is not None
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(result.double(), exact, rtol=eps, atol=4 * eps * exact.abs().max().item())


def test_several_bf16_products_are_rounded_once() -> None:
    """1 + three terms that bf16 cannot add to 1 one by one."""
    eps = torch.finfo(torch.bfloat16).eps
    one, x = torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16)
    wgrad = WeightGradient(one, _target())
    for dy in (one, *[one * eps / 2] * 3):
        wgrad.add(dy, x)
    result = wgrad.result()
    assert result is not None
    # 1 + 1.5 eps lies between 1 + eps and 1 + 2 eps; the tie goes to the even one.
    assert result.item() == 1 + 2 * eps


@pytest.mark.parametrize("with_main_grad", [False, True], ids=["autograd", "main_grad"])
def test_pieces_equal_the_whole(with_main_grad: bool) -> None:
    weight, dy, x = _operands(torch.float32)
    main_grad = torch.zeros(weight.shape) if with_main_grad else None
    wgrad = WeightGradient(weight, _target(main_grad))
    pieces = wgrad.pieces(dy, x)
    assert len(pieces) == 3
    for piece in pieces:
        piece()
    result = wgrad.result() if main_grad is None else main_grad
    assert result is not None
    torch.testing.assert_close(result, dy.t() @ x)
    assert len(WeightGradient(weight, _target(main_grad)).pieces(dy, x, 1)) == 1


def test_no_rows_give_a_zero_gradient() -> None:
    weight, _, _ = _operands(torch.float32)
    result = WeightGradient(weight, _target()).result()
    assert result is not None
    assert torch.equal(result, torch.zeros_like(weight))


def test_weight_done_provides_what_autograd_gets() -> None:
    weight, dy, x = _operands(torch.float32)
    placeholder = torch.zeros(0)
    wgrad = WeightGradient(weight, _target(torch.zeros(weight.shape), lambda: placeholder))
    wgrad.add(dy, x)
    assert wgrad.result() is placeholder


def test_adjacent_row_ranges_are_joined_once() -> None:
    spans = Spans()
    for rows in ((4, 6), (0, 2), (8, 8), (2, 4), (9, 11)):
        spans.add(rows)
    assert spans.joined() == [(0, 6), (9, 11)]
    assert spans.joined() == []


@dataclass(frozen=True)
class _Layer:
    """Hides the weight from autograd, which would run the hooks of a weight without a gradient."""

    weight: torch.Tensor
    deferred: DeferredWgrad
    take: bool = False


class _Deferring(torch.autograd.Function):
    """`x @ weight.T`, whose weight gradient is postponed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: _Layer) -> torch.Tensor:
        ctx.x, ctx.layer = x, layer
        return x @ layer.weight.detach().t()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layer: _Layer = ctx.layer
        layer.deferred.put(layer.weight, grads[0], ctx.x, _target())
        if layer.take:
            for piece in layer.deferred.take():
                piece()
        return grads[0] @ layer.weight, None


@pytest.mark.parametrize("take", [False, True], ids=["at the end of the pass", "taken"])
def test_a_deferred_gradient_reaches_its_parameter(take: bool) -> None:
    weight, dy, x = _operands(torch.float32)
    weight.requires_grad_()
    for _ in range(2):
        _Deferring.apply(x.clone().requires_grad_(), _Layer(weight, DeferredWgrad(), take)).backward(dy)
    torch.testing.assert_close(weight.grad, 2 * dy.t() @ x)


def test_a_backward_pass_that_an_exception_ended_leaves_no_gradient() -> None:
    weight, dy, x = _operands(torch.float32)
    weight.requires_grad_()
    layer = _Layer(weight, DeferredWgrad())

    def fail(_: torch.Tensor) -> None:
        raise ValueError("a bad batch")

    below = x.clone().requires_grad_() * 1
    below.register_hook(fail)
    with pytest.raises(ValueError, match="a bad batch"):
        _Deferring.apply(below, layer).backward(10 * dy)
    _Deferring.apply(x.clone().requires_grad_(), layer).backward(dy)
    torch.testing.assert_close(weight.grad, dy.t() @ x)


def test_two_terms_of_one_weight_are_one_gradient() -> None:
    weight, dy, x = _operands(torch.float32)
    weight.requires_grad_()
    calls: list[int] = []
    weight.register_post_accumulate_grad_hook(lambda _: calls.append(1))
    layer, rows = _Layer(weight, DeferredWgrad()), x.clone().requires_grad_()
    outputs = [_Deferring.apply(rows[half], layer) for half in (slice(0, 5), slice(5, ROWS))]
    torch.cat(outputs).backward(dy)
    assert calls == [1]
    torch.testing.assert_close(weight.grad, dy.t() @ x)


def test_several_products_are_rounded_once() -> None:
    """As over nodes: each adds to an fp32 total from the first one on."""
    weight, dy, x = _operands(torch.bfloat16)
    wgrad, total = WeightGradient(weight, _target()), torch.zeros(weight.shape)
    wgrad.start_in_fp32()
    for rows in (slice(0, 5), slice(5, ROWS)):
        wgrad.add(dy[rows], x[rows])
        total += (dy[rows].t() @ x[rows]).float()
    result = wgrad.result()
    assert result is not None
    assert torch.equal(result, total.bfloat16())
