"""Worker functions: Ulysses attention and its reference on the same data, forward and backward."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import Projection, UlyssesPlan, ulysses_attention, ulysses_self_attention
from megatron_overlap.ops.reference import gather, own_rows
from megatron_overlap.schedules import SequenceLayout
from tests.helpers import reference
from tests.helpers.late import LateTransport

BATCH = 2
HEAD_SIZE = 8
NAMES = ("y", "dq", "dk", "dv")

Sequence = Literal["contiguous", "zigzag", "lengths"]
"""How ranks hold the sequence; with `lengths` the first rank holds nothing and the last one most rows."""


@dataclass(frozen=True)
class AttentionCase:
    """One call of Ulysses attention."""

    rows: int
    heads: int
    kv_heads: int
    sequence: Sequence = "contiguous"
    plan: UlyssesPlan | None = None
    causal: bool = True
    softmax_scale: float | None = None
    late: bool = True
    """Messages complete as late as the transport contract allows."""
    repeats: int = 2

    def layout(self, ranks: int) -> SequenceLayout:
        return layout_of(self.sequence, self.rows, ranks)


@dataclass(frozen=True)
class LayerCase:
    """One call of a whole self-attention layer under Ulysses."""

    rows: int
    heads: int
    kv_heads: int
    sequence: Sequence
    dtype: torch.dtype = torch.float64
    plan: UlyssesPlan | None = None
    bias: bool = True
    rotary: bool = True
    main_grad: bool = False
    late: bool = True

    def layout(self, ranks: int) -> SequenceLayout:
        return layout_of(self.sequence, self.rows, ranks)


def layout_of(sequence: Sequence, rows: int, ranks: int) -> SequenceLayout:
    if sequence == "lengths":
        lengths = [0, *([3] * (ranks - 2)), rows - 3 * (ranks - 2)] if ranks > 1 else [rows]
        return reference.layout_of_lengths(lengths)
    return (SequenceLayout.zigzag if sequence == "zigzag" else SequenceLayout.contiguous)(rows, ranks)


def make_tensors(
    group: dist.ProcessGroup, layout: SequenceLayout, heads: int, kv_heads: int, seed: int
) -> list[torch.Tensor]:
    """Own rows of query, key, value and output gradient, in float64."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    rows = layout.rows_of(rank)
    return [
        torch.randn(rows, BATCH, count, HEAD_SIZE, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def run(function: Any, tensors: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors[:3]]
    y = function(*leaves, **options)
    y.backward(tensors[3])
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def compare_with_reference(group: dist.ProcessGroup, case: AttentionCase) -> list[float]:
    """In float64, equal to textbook attention up to the last bits. Returns the bytes sent by forward and backward."""
    transport: Any = LateTransport(group) if case.late else transport_of(group)
    layout = case.layout(dist.get_world_size(group))
    options: dict[str, Any] = {"causal": case.causal, "softmax_scale": case.softmax_scale, "layout": layout}
    for repeat in range(case.repeats):
        tensors = make_tensors(group, layout, case.heads, case.kv_heads, 1 + repeat)
        expected = run(reference.ulysses_attention, tensors, group=group, **options)
        sent: list[float] = []

        def observer(_: str, num_bytes: int, sent: list[float] = sent) -> None:
            sent.append(num_bytes)

        result = run(ulysses_attention, tensors, group=transport, plan=case.plan, observer=observer, **options)
        for name, got, true in zip(NAMES, result, expected, strict=True):
            assert got.shape == true.shape
            assert torch.isfinite(got).all(), f"{name}: not finite"
            torch.testing.assert_close(got, true, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
    if case.late:
        transport.close()
    return sent


def compare_rounding(group: dist.ProcessGroup, case: AttentionCase, dtype: torch.dtype) -> None:
    """In fp32 and bf16, the error against float64 is that of attention on one rank."""
    transport: Any = LateTransport(group)
    layout = case.layout(dist.get_world_size(group))
    tensors = [tensor.to(dtype) for tensor in make_tensors(group, layout, case.heads, case.kv_heads, 5)]
    exact = run(reference.ulysses_attention, [tensor.double() for tensor in tensors], group=group, layout=layout)
    result = run(ulysses_attention, tensors, group=transport, layout=layout, plan=case.plan)
    whole = [gather(tensor, group, layout) for tensor in tensors]
    # The same kernel on one rank, which sums all key gradients itself.
    one_rank = run(ulysses_attention, whole, group=transport_of(_group_of_one()))
    rank = dist.get_rank(group)
    for name, got, alone, true in zip(NAMES, result, one_rank, exact, strict=True):
        own = own_rows(alone, layout, rank)
        allowed = 2 * (own.double() - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        error = (got.double() - true).abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    transport.close()


_GROUP_OF_ONE: list[dist.ProcessGroup] = []


def _group_of_one() -> dist.ProcessGroup:
    """A group of this process alone, created once."""
    if not _GROUP_OF_ONE:
        groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _GROUP_OF_ONE.append(groups[dist.get_rank()])
    return _GROUP_OF_ONE[0]


def compare_random_calls(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """Random shapes and plans, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    size = dist.get_world_size(group)
    for _ in range(count):
        heads = size * draw([1, 2, 3, 4, 6])
        case = AttentionCase(
            kv_heads=draw([kv for kv in range(1, heads + 1) if heads % kv == 0]),
            rows=draw([0, 1, 5, 13, 24]) + 3 * size,
            heads=heads,
            sequence=draw(["contiguous", "zigzag", "lengths"]),
            plan=UlyssesPlan(draw([None, 1, 2, 3, 8]), draw(["direct", "direct", "serial"])),
            causal=draw([True, True, False]),
            softmax_scale=draw([None, 0.3]),
            repeats=1,
        )
        compare_with_reference(group, case)


def compare_recomputation(group: dist.ProcessGroup) -> list[bool]:
    """Whether output and gradients of two layers are bitwise equal with and without activation recomputation."""
    size = dist.get_world_size(group)
    layout = SequenceLayout.zigzag(8 * size, size)
    tensors = make_tensors(group, layout, heads=4, kv_heads=2, seed=9)

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, again: bool) -> torch.Tensor:
        def layer(x: torch.Tensor) -> torch.Tensor:
            return ulysses_attention(x, k, v, group=group, layout=layout)

        for _ in range(2):
            q = checkpoint(layer, q, use_reentrant=False) if again else layer(q)
        return q

    plain, again = (run(layers, tensors, again=flag) for flag in (False, True))
    return [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]


def error_messages(group: dist.ProcessGroup) -> list[str]:
    """Error messages of calls with arguments that do not fit."""
    size = dist.get_world_size(group)
    q = torch.randn(4, 1, 2 * size, 8)
    k = torch.randn(4, 1, size, 8)
    calls: list[dict[str, Any]] = [
        {"k": k[:3], "v": k[:3]},
        {"v": k[..., :4]},
        {"k": k.double(), "v": k.double()},
        {"q": q[:, :, : size + 1], "k": q[:, :, :1], "v": q[:, :, :1]},
        {"layout": SequenceLayout.contiguous(4 * size + size, size)},
        {"layout": SequenceLayout.contiguous(4 * (size + 1), size + 1)},
    ]
    messages = []
    for call in calls:
        try:
            ulysses_attention(**{"q": q, "k": k, "v": k, **call}, group=group)
        except ValueError as error:
            messages.append(str(error))
    return messages


def compare_layer(group: dist.ProcessGroup, case: LayerCase) -> None:
    """Output and every gradient of the layer against its parts: projection, reference attention, projection."""
    transport: Any = LateTransport(group) if case.late else transport_of(group)
    heads, kv_heads, dtype = case.heads, case.kv_heads, case.dtype
    rank, hidden = dist.get_rank(group), 24
    layout = case.layout(dist.get_world_size(group))
    own = layout.rows_of(rank)
    features = (heads + 2 * kv_heads) * HEAD_SIZE
    shared = torch.Generator().manual_seed(3)
    per_rank = torch.Generator().manual_seed(40 + rank)

    def random(*shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, dy = (random(own, BATCH, hidden, generator=per_rank) for _ in range(2))
    # Scores near one, as in a model: larger scores amplify rounding errors.
    w_qkv = random(features, hidden, generator=shared) / hidden**0.5
    w_out = random(hidden, heads * HEAD_SIZE, generator=shared) / (heads * HEAD_SIZE) ** 0.5
    b = random(features, generator=shared) if case.bias else None
    angles = torch.cat([torch.arange(*run, dtype=torch.float64) for run in layout.runs[rank]]).to(dtype)

    def rotate(value: torch.Tensor) -> torch.Tensor:
        angle = angles.to(value.dtype)[:, None, None, None]
        left, right = value.chunk(2, dim=-1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)

    encode = rotate if case.rotary else None

    def plain(x: torch.Tensor, w_qkv: torch.Tensor, b: Any, w_out: torch.Tensor) -> torch.Tensor:
        projected = x @ w_qkv.t() if b is None else x @ w_qkv.t() + b
        per_key = projected.view(own, BATCH, kv_heads, heads // kv_heads + 2, HEAD_SIZE)
        q, k, v = per_key[:, :, :, :-2].flatten(2, 3), per_key[:, :, :, -2], per_key[:, :, :, -1]
        if encode is not None:
            q, k = encode(q), encode(k)
        return reference.ulysses_attention(q, k, v, group=group, layout=layout).flatten(2) @ w_out.t()

    def step(function: Any, to: torch.dtype) -> list[Any]:
        leaves = [None if t is None else t.to(to, copy=True).requires_grad_() for t in (x, w_qkv, b, w_out)]
        y = function(*leaves)
        y.backward(dy.to(to))
        return [y.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]

    into = [torch.ones(w.shape, dtype=torch.float32 if dtype.itemsize < 4 else dtype) for w in (w_qkv, w_out)]

    def fused(x: torch.Tensor, w_qkv: torch.Tensor, b: Any, w_out: torch.Tensor) -> torch.Tensor:
        weights = [
            Projection(weight, into[index] if case.main_grad else None) for index, weight in enumerate((w_qkv, w_out))
        ]
        counts = {"num_heads": heads, "num_kv_heads": kv_heads}
        return ulysses_self_attention(
            x, weights[0], b, weights[1], group=transport, rotate=encode, layout=layout, plan=case.plan, **counts
        )

    exact, unfused, got = step(plain, torch.float64), step(plain, dtype), step(fused, dtype)
    if case.main_grad:
        assert got[2] is got[4] is None
        got[2], got[4] = (gradient - 1 for gradient in into)
    for name, result, alone, true in zip(("y", "dx", "dw_qkv", "db", "dw_out"), got, unfused, exact, strict=True):
        assert (result is None) == (true is None), name
        if true is None or true.numel() == 0:
            continue
        assert torch.isfinite(result).all(), f"{name}: not finite"
        error, own_error = ((value.double() - true).abs().max() for value in (result, alone))
        # In float64 the parts are the exact result, so their error is 0. In float32 the order of the last sum depends
        # on the GEMM of the processor, and the parts may be closer to the exact result by chance. Each term rounds by
        # up to half a unit, so the sum is a random walk; twice its expected length is allowed in addition.
        terms = {"y": heads * HEAD_SIZE, "dx": features}.get(name, 2 * own)
        slack = {torch.float64: 256, torch.float32: 4 + math.sqrt(terms)}.get(dtype, 4)
        allowed = 2 * own_error + slack * torch.finfo(dtype).eps * (true.abs().max() + float(case.main_grad))
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
    if case.late:
        transport.close()
