"""Wrappers of torch's flash-attention kernels, shared by Ulysses, balanced and query-split attention.

The CPU uses `_scaled_dot_product_flash_attention_for_cpu`, CUDA the FlashAttention of torch. Both return the logarithm
of the sum of exponentials of the scores (log-sum-exp). Partial results over different keys are merged by it. Backward
takes the merged result and its log-sum-exp, so each part computes its own contribution to the gradient.

Three layouts, by function:

- `flash_forward`, `flash_backward`: `[B, H, S, D]`, one kernel call.
- `sequence_forward`, `sequence_backward`: whole sequences, `[S, B, H, D]`.
- `partial_*` and `documents_*`: rows of documents, `[rows, H, D]`.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from megatron_overlap.comm import BufferPool
from megatron_overlap.ops.wgrad import add_wide

_aten = torch.ops.aten
_flash_cpu = _aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = _aten._scaled_dot_product_flash_attention_for_cpu_backward

Grads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Gradients of query, key and value."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Attention of whole sequences as a function of query `[S, B, Hq, D]`, key and value `[S, B, Hkv, D]`, to `[S, B, Hq,
D]`. Autograd differentiates it."""

_Sequences = tuple[torch.Tensor | None, torch.Tensor | None, int, int]
"""First rows of packed sequences and their longest length, each of queries and keys."""


class Attended(NamedTuple):
    """Inputs and results of attention, in one of the layouts. The results may be merged over more keys than `k`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, rows: slice) -> "Attended":
        """Some rows of all tensors, `[rows, ...]` each."""
        return Attended(*(x[rows] for x in self))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums of `dtype` values: fp32 for bf16 and fp16, otherwise `dtype`."""
    return torch.promote_types(dtype, torch.float32)


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equals `softmax(scale * q @ k.T) @ v` for each head, with a causal mask if `causal`, in one kernel call.

    Args:
        q: `[B, Hq, n, D]`, D innermost in memory.
        k: `[B, Hkv, m, D]`; Hq / Hkv consecutive query heads share a key head.
        v: `[B, Hkv, m, D]`.
        causal: query i sees keys 0..i.

    Returns:
        `[B, Hq, n, D]`, dtype of `q`, and the log-sum-exp `[B, Hq, n]` in fp32 (fp64 for fp64).
    """
    if not q.is_cuda:
        return _flash_cpu(q, k, v, 0.0, causal, scale=scale)
    sequences = None, None, q.shape[2], k.shape[2]
    out, lse = _cuda_forward([x.transpose(1, 2) for x in (q, k, v)], sequences, causal, scale)
    return out.transpose(1, 2), lse


def flash_backward(dout: torch.Tensor, attended: Attended, *, causal: bool, scale: float) -> Grads:
    """Gradients of `flash_forward`."""
    if not dout.is_cuda:
        return _flash_cpu_backward(dout, *attended, 0.0, causal, scale=scale)
    sequences = None, None, attended.q.shape[2], attended.k.shape[2]
    rows = [*(x.transpose(1, 2) for x in (dout, *attended[:4])), attended.lse.contiguous()]
    dq, dk, dv = (grad.transpose(1, 2) for grad in _cuda_backward(rows, sequences, causal, scale))
    return dq, dk, dv


class SavedSequence(NamedTuple):
    """Tensors of one `sequence_forward` call for its backward; `[B, heads, S, D]` views."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    logsumexp: torch.Tensor | None


def sequence_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    kernel: Kernel | None = None,
) -> tuple[torch.Tensor, SavedSequence]:
    """Equals `softmax(scale * query @ key.T, causal) @ value` for each head, or `kernel(query, key, value)`.

    Returns:
        `[S, B, Hq, D]`, and the tensors that `sequence_backward` needs.
    """
    q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    logsumexp = None
    if q.numel() == 0:
        out = torch.zeros_like(q)
    elif kernel is not None or q.is_cuda:
        # The graph of the kernel over detached inputs is saved for backward.
        q, k, v = (tensor.detach().requires_grad_() for tensor in (q, k, v))
        with torch.enable_grad():
            if kernel is not None:
                out = kernel(*(tensor.permute(2, 0, 1, 3) for tensor in (q, k, v))).permute(1, 2, 0, 3)
            else:  # torch selects the kernel
                grouped = q.shape[1] != k.shape[1]
                out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    else:
        # On the CPU, `scaled_dot_product_attention` would repeat the key/value heads in memory.
        out, logsumexp = _flash_cpu(q, k, v, 0.0, causal, scale=scale)
    return out.detach().permute(2, 0, 1, 3), SavedSequence(q, k, v, out, logsumexp)


def sequence_backward(saved: SavedSequence, grad: torch.Tensor, *, causal: bool, scale: float) -> Grads:
    """Gradients of query, key and value, `[S, B, heads, D]` each, for `grad` of the result, `[S, B, Hq, D]`."""
    q, k, v, out, logsumexp = saved
    grad = grad.permute(1, 2, 0, 3)
    grads: tuple[torch.Tensor, ...]
    if q.numel() == 0:
        grads = tuple(torch.zeros_like(tensor) for tensor in (q, k, v))
    elif logsumexp is None:
        grads = torch.autograd.grad(out, (q, k, v), grad)
    else:
        grads = _flash_cpu_backward(grad, q, k, v, out, logsumexp, 0.0, causal, scale=scale)
    dq, dk, dv = (tensor.permute(2, 0, 1, 3) for tensor in grads)
    return dq, dk, dv


def partial_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equals `softmax(scale * q @ k.T) @ v` for each head: some queries with some keys of one document.

    `q` is `[n, Hq, D]`, `k` and `v` are `[m, Hkv, D]`, n and m above 0, D innermost in memory; see `flash_forward`. If
    `causal`, they are the same rows of the document; otherwise each query sees all keys.

    Returns:
        `[n, Hq, D]`, dtype of `q`, and the log-sum-exp `[n, Hq]` in fp32 (fp64 for fp64).
    """
    out, lse = flash_forward(_heads(q), _heads(k), _heads(v), causal=causal, scale=scale)
    return out[0].transpose(0, 1), lse[0].t()


def partial_backward(dout: torch.Tensor, attended: Attended, scale: float, *, causal: bool) -> Grads:
    """The contribution of these keys to the gradients. `out` and `lse` are merged over all keys of the queries."""
    dout, q, k, v, out = map(_heads, (dout, *attended[:4]))
    by_heads = Attended(q, k, v, out, attended.lse.t()[None])
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in flash_backward(dout, by_heads, causal=causal, scale=scale))
    return dq, dk, dv


def documents_forward(attended: Attended, lengths: Sequence[int], scale: float) -> None:
    """Writes causal attention of consecutive whole documents to `out` `[rows, Hq, D]` and `lse` `[rows, Hq]`."""
    q, k, v, out, lse = attended
    if q.is_cuda:
        starts, longest = _cu_seqlens(lengths, q.device), max(lengths)
        result, log = _cuda_forward((q, k, v), (starts, starts, longest, longest), True, scale)
        out.copy_(result)
        lse.copy_(log.t())
        return
    for rows in _runs(lengths):
        out[rows], lse[rows] = partial_forward(q[rows], k[rows], v[rows], scale, causal=True)


def documents_backward(
    dout: torch.Tensor, attended: Attended, lengths: Sequence[int], scale: float, grads: Grads
) -> None:
    """Gradients of `documents_forward`; writes `grads`."""
    if dout.is_cuda:
        starts, longest = _cu_seqlens(lengths, dout.device), max(lengths)
        given = dout.contiguous(), *attended[:4], attended.lse.t().contiguous()
        parts = _cuda_backward(given, (starts, starts, longest, longest), True, scale)
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part)
        return
    for rows in _runs(lengths):
        parts = partial_backward(dout[rows], attended.rows(rows), scale, causal=True)
        for grad, part in zip(grads, parts, strict=True):
            grad[rows] = part


class KeyGradients:
    """Gradients of keys and values, `shape` each, with the dtype and device of `like`.

    Where several terms are `added` to an element, sums of bf16 and fp16 are in fp32 and rounded once.
    """

    def __init__(self, shape: torch.Size, like: torch.Tensor, buffer_pool: BufferPool, *, added: bool = True) -> None:
        self._dtype, self._buffer_pool, self._added = like.dtype, buffer_pool, added
        if not added or like.element_size() >= 4:
            self._totals = like.new_empty(shape), like.new_empty(shape)
        else:
            dk, dv = buffer_pool.take("key_gradients", (2, *shape), like, dtype=torch.float32)
            self._totals = dk, dv
        for total in self._totals if added else ():
            total.zero_()

    def add(self, place: slice | tuple[slice, ...], dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Adds terms to elements `place`, or writes them."""
        for total, term in zip(self._totals, (dk, dv), strict=True):
            if self._added:
                add_wide(total[place], term, self._buffer_pool)
            else:
                total[place].copy_(term)

    def result(self) -> list[torch.Tensor]:
        return [total.to(self._dtype) for total in self._totals]


def _heads(x: torch.Tensor) -> torch.Tensor:
    """`[n, H, D]` in the layout of `flash_forward`, `[1, H, n, D]`."""
    return x.transpose(0, 1)[None]


def _cuda_forward(
    rows: Sequence[torch.Tensor], sequences: _Sequences, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = _aten._flash_attention_forward(*rows, *sequences, 0.0, causal, False, scale=scale)
    return out, lse


def _cuda_backward(rows: Sequence[torch.Tensor], sequences: _Sequences, causal: bool, scale: float) -> Grads:
    # The random state is unused without dropout.
    rng = torch.empty(0, dtype=torch.int64, device=rows[0].device)
    return _aten._flash_attention_backward(*rows, *sequences, 0.0, causal, rng, rng, scale=scale)


def _runs(lengths: Sequence[int]) -> list[slice]:
    return [slice(*bounds) for bounds in pairwise([0, *accumulate(lengths)])]


def _cu_seqlens(lengths: Sequence[int], device: torch.device) -> torch.Tensor:
    # A copy from memory that is not pinned synchronises the stream.
    on_host = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)
