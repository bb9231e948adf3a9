"""PyTorch implementations of the TransformerEngine kernels that a training on CPU ranks needs.

Each computes what its CUDA counterpart computes; names, argument orders and results are those of TransformerEngine
2.20.2. Only high precision (fp32, bf16, fp16) is implemented: no FP8. tests/adapters/cpu/test_te_kernels.py checks the
results against autograd. Speed and rounding of the CUDA kernels are not reproduced.
"""

import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

_Tensor = torch.Tensor


def enumeration(name: str, members: str, prefix: str = "") -> Any:
    """An enumeration from `A B=3 C`: the value of a member is given, or one more than that of the member before."""
    values: dict[str, int] = {}
    following = 0
    for member in members.split():
        short, _, value = member.partition("=")
        values[prefix + short] = following = int(value or following)
        following += 1
    return enum.IntEnum(name, values)


DType = enumeration("DType", "kByte kInt32=2 kFloat32=4 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1=10")
_TORCH_TYPES = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
}
KERNELS: dict[str, Callable[..., Any]] = {}
"""Every kernel that is implemented, by TE's name."""


def _kernel[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Adds a kernel, without autograd, to `KERNELS`."""
    KERNELS[function.__name__] = function = torch.no_grad()(function)
    return function


@_kernel
def generic_gemm(
    a: _Tensor,
    transpose_a: bool,
    b: _Tensor,
    transpose_b: bool,
    out: _Tensor | None,
    quantizer: Any,
    out_dtype: int | None,
    bias: _Tensor | None,
    bias_dtype: int,
    gelu: bool,
    gelu_input: _Tensor | None,
    grad: bool,
    scratch: _Tensor,
    scratch_bytes: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: _Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> tuple[_Tensor, _Tensor | None, None, _Tensor | None]:
    """`out = alpha * op(b) @ op(a)`, added to `out` with `accumulate`; cuBLAS's column-major order, read in rows.

    Returns the product, the gradient of the bias (with `grad` and a bias: the sum of the rows of `b`), None, and
    `extra_output`.
    """
    _high_precision(quantizer, a, b)
    if gelu or comm_overlap is not None:
        raise NotImplementedError("generic_gemm: GELU and communication inside the GEMM need a GPU")
    left, right = _rows(b), _rows(a)
    product = (left.t() if transpose_b else left) @ (right.t() if transpose_a else right)
    if alpha != 1.0:
        product *= alpha
    bias_grad = None
    if bias is not None and grad:
        bias_grad = left.sum(0, dtype=torch.float32).to(bias.dtype)
    elif bias is not None:
        product = product + bias
    shape = product.shape if transpose_b else (*b.shape[:-1], product.shape[-1])
    product = product.to(a.dtype if out_dtype is None else _TORCH_TYPES[DType(int(out_dtype))]).view(shape)
    if out is not None:
        out.add_(product) if accumulate else out.copy_(product)
        product = out
    return product, bias_grad, None, extra_output


@_kernel
def te_general_grouped_gemm(
    a: list[_Tensor],
    transpose_a: bool,
    b: list[_Tensor],
    transpose_b: bool,
    out: list[_Tensor],
    out_dtype: int | None,
    m_splits: Sequence[int] | None,
    bias: list[_Tensor],
    bias_dtype: int,
    single_output: bool,
    gelu_input: list[_Tensor],
    grad: bool,
    scratch: Any,
    scratch_bytes: int,
    accumulate: bool,
    *_: Any,
) -> list[_Tensor]:
    """`generic_gemm` of each group; with `single_output` the groups are consecutive rows of `out[0]`."""
    outs = list(out[0].split(list(m_splits or ()))) if single_output else out
    for index, each in enumerate(outs):
        one = None if bias[index].numel() == 0 else bias[index]
        operands = a[index], transpose_a, b[index], transpose_b, each
        rest: tuple[Any, ...] = (bias_dtype, False, None, grad, scratch, scratch_bytes, accumulate, False)
        bias_grad = generic_gemm(*operands, None, out_dtype, one, *rest)[1]
        if one is not None and bias_grad is not None:
            one.copy_(bias_grad)
    return bias


@_kernel
def rmsnorm_fwd(
    x: _Tensor,
    weight: _Tensor,
    eps: float,
    out: _Tensor | None,
    quantizer: Any,
    out_dtype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[_Tensor, None, _Tensor]:
    """`x * rsqrt(mean(x^2) + eps) * weight`, and the reciprocal root of every row, fp32."""
    _high_precision(quantizer)
    rows = _rows(x).float()
    rsigma = torch.rsqrt(rows.square().mean(-1) + eps)
    y = rows * rsigma[:, None] * _gamma(weight, zero_centered_gamma)
    return _normalized(y, x, out, out_dtype), None, rsigma


@_kernel
def rmsnorm_bwd(
    dy: _Tensor, x: _Tensor, rsigma: _Tensor, weight: _Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[_Tensor, _Tensor]:
    """Gradients of `rmsnorm_fwd` with respect to `x` and `weight`."""
    grad, normal = _rows(dy).float(), _rows(x).float() * rsigma[:, None]
    scaled = grad * _gamma(weight, zero_centered_gamma)
    dx = rsigma[:, None] * (scaled - normal * (scaled * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype).view(x.shape), (grad * normal).sum(0).to(weight.dtype)


@_kernel
def rmsnorm_bwd_add(
    dy: _Tensor, x: _Tensor, add: _Tensor, rsigma: _Tensor, weight: _Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[_Tensor, _Tensor]:
    """As `rmsnorm_bwd`, with `add` added to the gradient of `x`."""
    dx, dweight = rmsnorm_bwd(dy, x, rsigma, weight, sm_margin, zero_centered_gamma)
    return dx + add, dweight


@_kernel
def layernorm_fwd(
    x: _Tensor,
    weight: _Tensor,
    bias: _Tensor | None,
    eps: float,
    out: _Tensor | None,
    quantizer: Any,
    out_dtype: int,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """`(x - mean) * rsqrt(variance + eps) * weight + bias`, with mean and reciprocal root of every row, fp32."""
    _high_precision(quantizer)
    rows = _rows(x).float()
    mean = rows.mean(-1)
    centred = rows - mean[:, None]
    rsigma = torch.rsqrt(centred.square().mean(-1) + eps)
    y = centred * rsigma[:, None] * _gamma(weight, zero_centered_gamma)
    if bias is not None:
        y = y + bias.float()
    return _normalized(y, x, out, out_dtype), mean, rsigma


@_kernel
def layernorm_bwd(
    dy: _Tensor, x: _Tensor, mean: _Tensor, rsigma: _Tensor, weight: _Tensor, sm_margin: int, zero_centered_gamma: bool
) -> tuple[_Tensor, _Tensor, _Tensor]:
    """Gradients of `layernorm_fwd` with respect to `x`, `weight` and `bias`."""
    grad = _rows(dy).float()
    normal = (_rows(x).float() - mean[:, None]) * rsigma[:, None]
    scaled = grad * _gamma(weight, zero_centered_gamma)
    centred = scaled - scaled.mean(-1, keepdim=True) - normal * (scaled * normal).mean(-1, keepdim=True)
    dx = (rsigma[:, None] * centred).to(x.dtype).view(x.shape)
    return dx, (grad * normal).sum(0).to(weight.dtype), grad.sum(0).to(weight.dtype)


def _activation(function: Callable[[_Tensor], _Tensor]) -> tuple[Callable[..., _Tensor], Callable[..., _Tensor]]:
    def forward(x: _Tensor, quantizer: Any) -> _Tensor:
        _high_precision(quantizer)
        with torch.no_grad():
            return function(x.float()).to(x.dtype)

    def backward(dy: _Tensor, x: _Tensor, quantizer: Any) -> _Tensor:
        _high_precision(quantizer)
        with torch.enable_grad():
            leaf = x.detach().float().requires_grad_()
            (dx,) = torch.autograd.grad(function(leaf), leaf, dy.float())
        return dx.to(x.dtype)

    return forward, backward


def _swiglu(x: _Tensor) -> _Tensor:
    gate, value = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * value


@_kernel
def multi_tensor_scale(
    chunk_size: int, overflow: _Tensor, lists: Sequence[Sequence[_Tensor]], scale: float | _Tensor
) -> None:
    """Each of the second list becomes the one of the first times `scale`; `overflow` becomes 1 at an inf or NaN."""
    for source, target in zip(*lists, strict=True):
        target.copy_(source.float() * float(scale))
        if not torch.isfinite(source).all():
            overflow.fill_(1)


@_kernel
def multi_tensor_l2norm(
    chunk_size: int, overflow: _Tensor, lists: Sequence[Sequence[_Tensor]], per_tensor: bool = False
) -> tuple[_Tensor, _Tensor]:
    """The Euclidean norm of all tensors together, fp32 `[1]`, and with `per_tensor` that of each one."""
    norms = torch.stack([tensor.float().norm() for tensor in lists[0]])
    return norms.norm().reshape(1), norms if per_tensor else torch.empty(0)


@_kernel
def multi_tensor_adam(
    chunk_size: int,
    overflow: _Tensor,
    lists: Sequence[Sequence[_Tensor]],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    mode: int,
    bias_correction: int,
    weight_decay: float,
) -> None:
    """One step of Adam (`mode` 0) or AdamW (`mode` 1).

    The lists hold gradients, parameters, two moments and, where there is a fifth list, fp32 main parameters.
    """
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    for grad, parameter, first, second, *main in zip(*lists, strict=True):
        target = main[0] if main else parameter
        gradient, value = grad.float(), target.float()
        if mode == 0:
            gradient = gradient + weight_decay * value
        first.mul_(beta1).add_(gradient, alpha=1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (first / correction1) / ((second / correction2).sqrt() + eps)
        if mode == 1:
            update = update + weight_decay * value
        target.copy_(value - lr * update)
        if main:
            parameter.copy_(target)


@_kernel
def multi_tensor_adam_param_remainder(
    chunk_size: int, overflow: _Tensor, lists: Sequence[Sequence[_Tensor]], *settings: Any
) -> None:
    """As `multi_tensor_adam` with fp32 main parameters that are stored as bf16 parameters and int16 remainders.

    The bits of a main parameter are those of the parameter, then those of the remainder. The parameter is rounded up
    where the remainder, read as a signed number, is negative.
    """
    main = []
    for parameter, remainder in zip(lists[1], lists[4], strict=True):
        high = parameter.view(torch.int16).int() - (remainder < 0).int()
        main.append(((high << 16) | (remainder.int() & 0xFFFF)).view(torch.float32))
    multi_tensor_adam(chunk_size, overflow, [lists[0], main, lists[2], lists[3]], *settings)
    for parameter, remainder, value in zip(lists[1], lists[4], main, strict=True):
        remainder.copy_(value.view(torch.int16).view(*value.shape, 2)[..., 0])  # the low half of each number
        high = (value.view(torch.int32) >> 16) + (remainder < 0).int()
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))


@torch.no_grad()
def _scaled_softmax(x: _Tensor, scale: float, mask: _Tensor | None = None) -> _Tensor:
    """`softmax(scale * x)` over the last dimension, computed in fp32; masked elements, and rows of them, become 0."""
    scores = x.float() * scale
    if mask is None:
        return torch.softmax(scores, -1).to(x.dtype)
    return torch.softmax(scores.masked_fill(mask, -10000.0), -1).masked_fill(mask, 0).to(x.dtype)


def _causal_softmax(x: _Tensor, scale: float) -> _Tensor:
    """`_scaled_softmax` with a causal mask; the last query sees all keys."""
    queries, keys = x.shape[-2:]
    return _scaled_softmax(x, scale, torch.ones(queries, keys, dtype=torch.bool).triu(keys - queries + 1))


@torch.no_grad()
def _scaled_softmax_backward(dy: _Tensor, y: _Tensor, scale: float) -> _Tensor:
    """Gradient of `_scaled_softmax` with respect to `x`, from its result `y`."""
    weighted = dy.float() * y.float()
    return ((weighted - y.float() * weighted.sum(-1, keepdim=True)) * scale).to(y.dtype)


KERNELS |= {
    "multi_tensor_scale_tensor": multi_tensor_scale,
    "scaled_softmax_forward": lambda x, scale: _scaled_softmax(x, scale),
    "scaled_masked_softmax_forward": lambda x, mask, scale: _scaled_softmax(x, scale, mask.bool()),
    "scaled_upper_triang_masked_softmax_forward": _causal_softmax,
    "scaled_aligned_causal_masked_softmax_forward": _causal_softmax,
}
for _kind in ("", "_masked", "_upper_triang_masked", "_aligned_causal_masked"):
    KERNELS[f"scaled{_kind}_softmax_backward"] = _scaled_softmax_backward
KERNELS["swiglu"], KERNELS["dswiglu"] = _activation(_swiglu)
KERNELS["gelu"], KERNELS["dgelu"] = _activation(functools.partial(torch.nn.functional.gelu, approximate="tanh"))


def _rows(x: _Tensor) -> _Tensor:
    return x.reshape(-1, x.shape[-1])


def _gamma(weight: _Tensor, zero_centered: bool) -> _Tensor:
    return weight.float() + 1 if zero_centered else weight.float()


def _normalized(y: _Tensor, x: _Tensor, out: _Tensor | None, out_dtype: int) -> _Tensor:
    y = y.to(_TORCH_TYPES[DType(int(out_dtype))]).view(x.shape)
    return y if out is None else out.copy_(y)


def _high_precision(quantizer: Any, *tensors: _Tensor) -> None:
    if quantizer is not None or any(type(tensor) not in (torch.Tensor, torch.nn.Parameter) for tensor in tensors):
        raise NotImplementedError("quantised tensors (FP8) need a GPU: the CPU kernels compute in fp32, bf16 and fp16")
