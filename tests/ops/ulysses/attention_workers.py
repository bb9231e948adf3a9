"""What the workers run: Ulysses attention and its reference on the same data, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_overlap.comm import transport_of
from megatron_overlap.ops import Projection, UlyssesPlan, reference, ulysses_attention, ulysses_self_attention
from megatron_overlap.schedules import SequenceLayout
from tests.helpers.late import LateTransport

SIZE = 8
NAMES = ("y", "dq", "dk", "dv")


def layout_of(kind: str, rows: int, ranks: int) -> SequenceLayout:
    if kind == "lengths":
        # The first rank has nothing, the last one what is left.
        lengths = [0, *([3] * (ranks - 2)), rows - 3 * (ranks - 2)] if ranks > 1 else [rows]
        return SequenceLayout.of_lengths(lengths)
    return (SequenceLayout.zigzag if kind == "zigzag" else SequenceLayout.contiguous)(rows, ranks)


def make(group: dist.ProcessGroup, layout: SequenceLayout, heads: int, kv_heads: int, seed: int) -> list[torch.Tensor]:
    """Own rows of query, key, value and output gradient, in float64, B = 2."""
    rank = dist.get_rank(group)
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    rows = layout.rows_of(rank)
    return [
        torch.randn(rows, 2, count, SIZE, generator=generator, dtype=torch.float64)
        for count in (heads, kv_heads, kv_heads, heads)
    ]


def run(function: Any, data: list[torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Output and gradients."""
    leaves = [tensor.clone().requires_grad_() for tensor in data[:3]]
    y = function(*leaves, **options)
    y.backward(data[3])
    return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def against_reference(
    group: dist.ProcessGroup,
    rows: int,
    heads: int,
    kv_heads: int,
    kind: str = "contiguous",
    *,
    late: bool = True,
    plan: UlyssesPlan | None = None,
    causal: bool = True,
    scale: float | None = None,
    repeats: int = 2,
) -> list[float]:
    """In float64, equal to textbook attention but for the last bits; then the bytes that forward and backward sent."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    layout = layout_of(kind, rows, dist.get_world_size(group))
    for repeat in range(repeats):
        data = make(group, layout, heads, kv_heads, 1 + repeat)
        options: dict[str, Any] = {"causal": causal, "softmax_scale": scale, "layout": layout}
        expected = run(reference.ulysses_attention, data, group=group, **options)
        sent: list[float] = []

        def observer(_: str, num_bytes: int, sent: list[float] = sent) -> None:
            sent.append(num_bytes)

        got = run(ulysses_attention, data, group=transport, plan=plan, observer=observer, **options)
        for name, mine, true in zip(NAMES, got, expected, strict=True):
            assert mine.shape == true.shape
            assert torch.isfinite(mine).all(), f"{name}: not finite"
            torch.testing.assert_close(
                mine, true, rtol=1e-11, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
            )
    if late:
        transport.close()
    return sent


def rounding(group: dist.ProcessGroup, dtype: torch.dtype, heads: int, kv_heads: int, num_groups: int) -> None:
    """In fp32 and bf16, as near to float64 as attention on one rank is."""
    transport: Any = LateTransport(group)
    size = dist.get_world_size(group)
    layout = SequenceLayout.zigzag(70, size)
    data = [tensor.to(dtype) for tensor in make(group, layout, heads, kv_heads, 5)]
    exact = run(reference.ulysses_attention, [tensor.double() for tensor in data], group=group, layout=layout)
    plan = UlyssesPlan(num_groups=num_groups)
    got = run(ulysses_attention, data, group=transport, layout=layout, plan=plan)
    whole = [reference._GatherRuns.apply(tensor, group, layout) for tensor in data]
    # The same kernel on one rank: what is not split, and sums all key gradients itself.
    alone = run(ulysses_attention, whole, group=transport_of(_alone()))
    rank = dist.get_rank(group)
    for name, mine, one, true in zip(NAMES, got, alone, exact, strict=True):
        own = reference.own_rows(one, layout, rank)
        allowed = 2 * (own.double() - true).abs().max() + torch.finfo(dtype).eps * true.abs().max()
        off = (mine.double() - true).abs().max()
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"
    transport.close()


_ALONE: list[dist.ProcessGroup] = []


def _alone() -> dist.ProcessGroup:
    """A group of this process alone; made once."""
    if not _ALONE:
        made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        _ALONE.append(made[dist.get_rank()])
    return _ALONE[0]


def random_calls(group: dist.ProcessGroup, seed: int, count: int) -> None:
    """Shapes and plans drawn alike on every rank."""
    generator = torch.Generator().manual_seed(seed)

    def draw(choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=generator))]

    size = dist.get_world_size(group)
    for _ in range(count):
        heads = size * draw([1, 2, 3, 4, 6])
        kv_heads = draw([kv for kv in range(1, heads + 1) if heads % kv == 0])
        against_reference(
            group,
            draw([0, 1, 5, 13, 24]) + 3 * size,
            heads,
            kv_heads,
            draw(["contiguous", "zigzag", "lengths"]),
            plan=UlyssesPlan(draw([None, 1, 2, 3, 8]), draw(["direct", "direct", "serial"])),
            causal=draw([True, True, False]),
            scale=draw([None, 0.3]),
            repeats=1,
        )


def recomputed(group: dist.ProcessGroup) -> list[bool]:
    """Under activation recomputation, two layers, gradients are those without."""
    size = dist.get_world_size(group)
    layout = SequenceLayout.zigzag(8 * size, size)
    data = make(group, layout, 4, 2, 9)

    def layers(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, again: bool) -> torch.Tensor:
        def layer(x: torch.Tensor) -> torch.Tensor:
            return ulysses_attention(x, k, v, group=group, layout=layout)

        for _ in range(2):
            q = checkpoint(layer, q, use_reentrant=False) if again else layer(q)
        return q

    plain, again = (run(layers, data, again=flag) for flag in (False, True))
    return [torch.equal(a, b) for a, b in zip(plain, again, strict=True)]


def refused(group: dist.ProcessGroup) -> list[str]:
    """Messages of calls that do not fit."""
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


def layer(
    group: dist.ProcessGroup,
    rows: int,
    heads: int,
    kv_heads: int,
    kind: str,
    *,
    dtype: torch.dtype = torch.float64,
    plan: UlyssesPlan | None = None,
    bias: bool = True,
    rotary: bool = True,
    main_grad: bool = False,
    late: bool = True,
) -> None:
    """A whole layer against its parts, one after the other, around the reference: output and every gradient."""
    transport: Any = LateTransport(group) if late else transport_of(group)
    rank, hidden = dist.get_rank(group), 24
    layout = layout_of(kind, rows, dist.get_world_size(group))
    own = layout.rows_of(rank)
    features = (heads + 2 * kv_heads) * SIZE
    shared = torch.Generator().manual_seed(3)
    mine = torch.Generator().manual_seed(40 + rank)

    def random(*shape: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    x, dy = (random(own, 2, hidden, generator=mine) for _ in range(2))
    # Scores near one, as in a model: larger ones would blow up every rounding.
    w_qkv = random(features, hidden, generator=shared) / hidden**0.5
    w_out = random(hidden, heads * SIZE, generator=shared) / (heads * SIZE) ** 0.5
    b = random(features, generator=shared) if bias else None
    angles = torch.cat([torch.arange(*run, dtype=torch.float64) for run in layout.runs[rank]]).to(dtype)

    def rotate(value: torch.Tensor) -> torch.Tensor:
        angle = angles.to(value.dtype)[:, None, None, None]
        left, right = value.chunk(2, dim=-1)
        return torch.cat([left * angle.cos() - right * angle.sin(), right * angle.cos() + left * angle.sin()], dim=-1)

    encode = rotate if rotary else None

    def plain(x: torch.Tensor, w_qkv: torch.Tensor, b: Any, w_out: torch.Tensor) -> torch.Tensor:
        projected = x @ w_qkv.t() if b is None else x @ w_qkv.t() + b
        per_key = projected.view(own, 2, kv_heads, heads // kv_heads + 2, SIZE)
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
            Projection(weight, into[index] if main_grad else None) for index, weight in enumerate((w_qkv, w_out))
        ]
        counts = {"num_heads": heads, "num_kv_heads": kv_heads}
        return ulysses_self_attention(
            x, weights[0], b, weights[1], group=transport, rotate=encode, layout=layout, plan=plan, **counts
        )

    exact, unfused, got = step(plain, torch.float64), step(plain, dtype), step(fused, dtype)
    if main_grad:
        assert got[2] is got[4] is None
        got[2], got[4] = (gradient - 1 for gradient in into)
    for name, mine_, one, true in zip(("y", "dx", "dw_qkv", "db", "dw_out"), got, unfused, exact, strict=True):
        assert (mine_ is None) == (true is None), name
        if true is None or true.numel() == 0:
            continue
        assert torch.isfinite(mine_).all(), f"{name}: not finite"
        off, own_error = ((value.double() - true).abs().max() for value in (mine_, one))
        # In float64 the parts are what is exact, and their own error reads 0. In float32 the last sum is taken in
        # whatever order the processor's GEMM likes, and the parts may be nearer by luck: each of its terms rounds by up
        # to half a unit either way, a random walk, of which twice the usual length is allowed, beside what else is.
        terms = {"y": heads * SIZE, "dx": features}.get(name, 2 * own)
        slack = {torch.float64: 256, torch.float32: 4 + math.sqrt(terms)}.get(dtype, 4)
        allowed = 2 * own_error + slack * torch.finfo(dtype).eps * (true.abs().max() + float(main_grad))
        assert off <= allowed, f"{name}: off by {off:.2e}, allowed {allowed:.2e}"
    if late:
        transport.close()
