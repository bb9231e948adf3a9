"""What Megatron's dynamic inference engine takes from flash_attn, in PyTorch; its cache without Triton.

The dynamic engine keeps keys and values in blocks of a common memory, `[blocks, rows, heads, D]`. A block table names
the blocks of each request. tests/adapters/cpu/test_paged_attention.py compares with attention over whole sequences.
"""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from megatron_overlap.adapters.wrapping import Method, with_globals

MODULE = "flash_attn"


def install() -> None:
    """Makes `import flash_attn` find the functions below. Megatron stores them when it is imported."""
    module: Any = ModuleType(MODULE)
    module.__spec__ = ModuleSpec(MODULE, None)
    module.__version__ = "2.7.3"
    module.flash_attn_varlen_func, module.flash_attn_with_kvcache = flash_attn_varlen_func, flash_attn_with_kvcache
    sys.modules[MODULE] = module


def appended_by_index(original: Method, session: object) -> Method:
    """Factory of a patch: the method without the Triton kernel, as where Triton is not installed."""
    return with_globals(original, {"triton_append_key_value_cache": None})


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    block_table: torch.Tensor | None = None,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    """Causal attention of packed queries `[rows, heads, D]`; the queries of a request are its last positions.

    Args:
        cu_seqlens_q: first row of each request, and the number of rows.
        cu_seqlens_k: the same for its keys, as if they were packed.
        block_table: blocks of each request in the cache `k` and `v`, `[requests, blocks]`.
    """
    if not causal or tuple(window_size) != (-1, -1) or block_table is None or return_attn_probs:
        raise NotImplementedError("paged attention on CPU ranks is causal, without a window and without probabilities")
    out = torch.zeros_like(q)
    starts, keys = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for request in range(len(starts) - 1):
        rows, length = slice(starts[request], starts[request + 1]), keys[request + 1] - keys[request]
        if rows.start < rows.stop and length:
            out[rows] = _attend(q[rows], k, v, block_table[request], length, softmax_scale)
    return out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    block_table: torch.Tensor,
    num_splits: int = 0,
) -> torch.Tensor:
    """The same for queries `[requests, rows, heads, D]`, in decode one row each."""
    if not causal or tuple(window_size) != (-1, -1):
        raise NotImplementedError("paged attention on CPU ranks is causal and without a window")
    out = torch.zeros_like(q)
    for request, length in enumerate(cache_seqlens.tolist()):
        if length:
            out[request] = _attend(q[request], k_cache, v_cache, block_table[request], length, softmax_scale)
    return out


def _attend(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, blocks: torch.Tensor, length: int, scale: float
) -> torch.Tensor:
    used = blocks[: -(-length // k_cache.shape[1])].long()
    k, v = (cache[used].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
    k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1).float() for tensor in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    later = torch.ones(q.shape[0], length, dtype=torch.bool).triu(1 + length - q.shape[0])
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
