"""The kernels of TransformerEngine in PyTorch, compared with autograd in double precision."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_overlap.adapters.cpu import te_kernels, te_module
from megatron_overlap.adapters.cpu.te_kernels import DType

F32, BF16 = DType.kFloat32, DType.kBFloat16


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def gemm(a: torch.Tensor, b: torch.Tensor, layout: str, **options: Any) -> Any:
    settings = {
        "out": None,
        "out_dtype": F32,
        "bias": None,
        "grad": False,
        "accumulate": False,
        "alpha": 1.0,
        **options,
    }
    return te_kernels.generic_gemm(
        a,
        layout[0] == "T",
        b,
        layout[1] == "T",
        settings["out"],
        None,
        settings["out_dtype"],
        settings["bias"],
        F32,
        False,
        None,
        settings["grad"],
        torch.empty(0),
        0,
        settings["accumulate"],
        False,
        alpha=settings["alpha"],
    )


def test_gemm_of_forward_has_a_bias_and_keeps_the_leading_dimensions_of_its_rows() -> None:
    weight, x, bias = random(5, 7), random(3, 2, 7), random(5)
    y, bias_grad, _, _ = gemm(weight, x, "TN", bias=bias)
    torch.testing.assert_close(y, torch.nn.functional.linear(x, weight, bias))
    assert bias_grad is None


def test_gemm_of_dgrad_and_scaled_by_alpha() -> None:
    weight, dy = random(5, 7), random(3, 2, 5)
    dx = gemm(weight, dy, "NN", alpha=0.5)[0]
    torch.testing.assert_close(dx, 0.5 * dy @ weight)


def test_gemm_of_wgrad_adds_to_main_grad_and_sums_the_bias_gradient() -> None:
    x, dy, main_grad = random(6, 7, dtype=torch.bfloat16), random(6, 5, dtype=torch.bfloat16), torch.ones(5, 7)
    bias = random(5, dtype=torch.bfloat16)
    out, bias_grad, _, _ = gemm(x, dy, "NT", out=main_grad, bias=bias, grad=True, accumulate=True)
    assert out is main_grad
    torch.testing.assert_close(main_grad, 1 + (dy.t() @ x).float(), rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(bias_grad.float(), dy.float().sum(0), rtol=2**-7, atol=2**-7)


def test_gemm_overwrites_its_output_without_accumulate() -> None:
    out = torch.full((3, 5), math.nan)
    weight, x = random(5, 7), random(3, 7)
    gemm(weight, x, "TN", out=out)
    torch.testing.assert_close(out, x @ weight.t())


def norm_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, zero_centered: bool) -> Any:
    scale = weight + 1 if zero_centered else weight
    if bias is None:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * scale
    return torch.nn.functional.layer_norm(x, x.shape[-1:], scale, bias, 1e-5)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_equal_autograd(kind: str, dtype: torch.dtype, zero_centered: bool) -> None:
    x, weight, dy = random(5, 2, 24, dtype=dtype), random(24, dtype=dtype), random(5, 2, 24, dtype=dtype, seed=3)
    bias = random(24, dtype=dtype, seed=5) if kind == "layer" else None
    otype = F32 if dtype == torch.float32 else BF16
    if bias is None:
        y, _, rsigma = te_kernels.rmsnorm_fwd(x, weight, 1e-5, None, None, otype, 0, zero_centered)
        grads: tuple[torch.Tensor, ...] = te_kernels.rmsnorm_bwd(dy, x, rsigma, weight, 0, zero_centered)
    else:
        y, mean, rsigma = te_kernels.layernorm_fwd(x, weight, bias, 1e-5, None, None, otype, 0, zero_centered)
        grads = te_kernels.layernorm_bwd(dy, x, mean, rsigma, weight, 0, zero_centered)
    leaves = [each.double().requires_grad_() for each in (x, weight, bias) if each is not None]
    expected = norm_reference(leaves[0], leaves[1], leaves[2] if bias is not None else None, zero_centered)
    expected.backward(dy.double())
    bound = 1e-5 if dtype == torch.float32 else 2**-6
    assert y.dtype == dtype
    assert y.shape == x.shape
    torch.testing.assert_close(y.double(), expected.detach(), rtol=bound, atol=bound)
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got.double(), leaf.grad, rtol=bound, atol=bound * float(leaf.grad.abs().max()))


def test_norm_writes_into_a_given_output_and_adds_a_gradient() -> None:
    x, weight, out = random(4, 24), random(24), torch.full((4, 24), math.nan)
    y, _, rsigma = te_kernels.rmsnorm_fwd(x, weight, 1e-5, out, None, F32, 0, False)
    assert y is out
    assert torch.isfinite(out).all()
    dx, _ = te_kernels.rmsnorm_bwd(x, x, rsigma, weight, 0, False)
    added, _ = te_kernels.rmsnorm_bwd_add(x, x, torch.ones_like(x), rsigma, weight, 0, False)
    torch.testing.assert_close(added, dx + 1)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("swiglu", lambda x: torch.nn.functional.silu(x[..., :12]) * x[..., 12:]),
        ("gelu", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_activations_equal_autograd(name: str, reference: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = random(5, 24)
    leaf = x.double().requires_grad_()
    expected = reference(leaf)
    dy = random(*expected.shape, seed=2)
    expected.backward(dy.double())
    torch.testing.assert_close(te_kernels.KERNELS[name](x, None).double(), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(te_kernels.KERNELS[f"d{name}"](dy, x, None).double(), leaf.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "keys"),
    [("scaled", 8), ("scaled_masked", 8), ("scaled_upper_triang_masked", 6), ("scaled_aligned_causal_masked", 8)],
)
def test_softmaxes_equal_autograd(kind: str, keys: int) -> None:
    x, dy = random(2, 3, 6, keys), random(2, 3, 6, keys, seed=4)
    masks = {
        "scaled": torch.zeros(6, keys, dtype=torch.bool),
        "scaled_masked": random(6, keys) > 0.5,
        "scaled_upper_triang_masked": torch.ones(6, 6, dtype=torch.bool).triu(1),
        "scaled_aligned_causal_masked": torch.ones(6, 8, dtype=torch.bool).triu(3),
    }
    mask = masks[kind].expand(2, 1, 6, keys)
    leaf = x.double().requires_grad_()
    expected = torch.softmax((leaf * 0.25).masked_fill(mask, -math.inf), -1)
    expected.backward(dy.double())
    given = (x, mask, 0.25) if kind == "scaled_masked" else (x, 0.25)
    y = te_kernels.KERNELS[f"{kind}_softmax_forward"](*given)
    torch.testing.assert_close(y.double(), expected.detach(), rtol=1e-5, atol=1e-6)
    dx = te_kernels.KERNELS[f"{kind}_softmax_backward"](dy, y, 0.25)
    torch.testing.assert_close(dx.double(), leaf.grad, rtol=1e-5, atol=1e-6)


def test_softmax_of_a_row_that_is_masked_whole_is_zero() -> None:
    y = te_kernels.KERNELS["scaled_masked_softmax_forward"](random(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 1.0)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("main_params", [False, True])
def test_adam_equals_torch_for_three_steps(decoupled: bool, main_params: bool) -> None:
    dtype = torch.bfloat16 if main_params else torch.float32
    main = [random(6, 4), random(3)]
    parameters = [each.to(dtype) for each in main] if main_params else [each.clone() for each in main]
    moments = [[torch.zeros_like(each) for each in main] for _ in range(2)]
    leaves = [each.clone().requires_grad_() for each in main]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind(leaves, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)
    for step in (1, 2, 3):
        grads = [random(*each.shape, seed=step) for each in main]
        for leaf, grad in zip(leaves, grads, strict=True):
            leaf.grad = grad.clone()
        optimizer.step()
        lists = [grads, parameters, *moments, *([main] if main_params else [])]
        te_kernels.multi_tensor_adam(0, torch.zeros(1), lists, 0.1, 0.8, 0.9, 1e-6, step, int(decoupled), 1, 0.3)
    for got, leaf in zip(main if main_params else parameters, leaves, strict=True):
        torch.testing.assert_close(got, leaf.detach(), rtol=1e-5, atol=1e-6)
    if main_params:
        assert all(torch.equal(low, high.to(dtype)) for low, high in zip(parameters, main, strict=True))


def test_adam_with_remainders_equals_adam_with_main_parameters() -> None:
    main = [random(6, 4), random(3)]
    low = [each.to(torch.bfloat16) for each in main]
    # The remainder holds the low half of the bits; the stored parameter is the nearest one, so it may be one above.
    remainders = [each.view(torch.int16).view(*each.shape, 2)[..., 0].clone() for each in main]
    high = [(each.view(torch.int32) >> 16).short() for each in main]
    stored = [(h + (r < 0).short()).view(torch.bfloat16) for h, r in zip(high, remainders, strict=True)]
    moments, others = ([[torch.zeros_like(each) for each in main] for _ in range(2)] for _ in range(2))
    for step in (1, 2):
        grads = [random(*each.shape, seed=step) for each in main]
        settings = (0.1, 0.8, 0.9, 1e-6, step, 1, 1, 0.3)
        te_kernels.multi_tensor_adam(0, torch.zeros(1), [grads, low, *moments, main], *settings)
        lists = [grads, stored, *others, remainders]
        te_kernels.multi_tensor_adam_param_remainder(0, torch.zeros(1), lists, *settings)
    for value, parameter, remainder in zip(main, stored, remainders, strict=True):
        bits = (parameter.view(torch.int16) - (remainder < 0).short()).int() << 16 | (remainder.int() & 0xFFFF)
        assert torch.equal(bits.view(torch.float32), value)


def test_norm_of_gradients_and_scaling_report_an_overflow() -> None:
    tensors, overflow = [random(4, 3), random(5)], torch.zeros(1, dtype=torch.int)
    total, each = te_kernels.multi_tensor_l2norm(0, overflow, [tensors], True)
    torch.testing.assert_close(total[0], torch.cat([tensor.flatten() for tensor in tensors]).norm())
    torch.testing.assert_close(each, torch.stack([tensor.norm() for tensor in tensors]))
    scaled = [torch.empty_like(tensor) for tensor in tensors]
    te_kernels.KERNELS["multi_tensor_scale_tensor"](0, overflow, [tensors, scaled], torch.tensor([0.25]))
    torch.testing.assert_close(scaled[0], tensors[0] * 0.25)
    assert overflow.item() == 0
    tensors[1][2] = math.inf
    te_kernels.multi_tensor_scale(0, overflow, [tensors, scaled], 0.25)
    assert overflow.item() == 1


def test_kernels_without_an_implementation_raise_by_name() -> None:
    module = te_module.NativeModule("transformer_engine_torch")
    with pytest.raises(NotImplementedError, match="transformer_engine_torch.fused_attn_fwd: this kernel needs a GPU"):
        module.fused_attn_fwd(1)
    with pytest.raises(NotImplementedError, match="quantised tensors"):
        te_kernels.rmsnorm_fwd(random(2, 4), random(4), 1e-5, None, object(), F32, 0, False)
