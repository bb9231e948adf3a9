"""What the workers run: two layers on halves of a micro-batch, against the same layers whole, in float64 too."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from megatron_overlap.comm import BufferPool
from megatron_overlap.ops import reference
from megatron_overlap.ops.tensor_parallel.batch_overlap import (
    column_part,
    part_input,
    part_output,
    reserve_slot,
    row_part,
)
from megatron_overlap.ops.tensor_parallel.part_messages import AllReduceMessages, PartWork, Rows
from megatron_overlap.ops.wgrad import DeferredWgrad, WgradTarget
from tests.helpers.numerics import assert_close_to_exact

SEQUENCE, K, F = 13, 24, 20
NAMES = ("y", "dx", "dw1", "dw2", "dbias")


class Logged(AllReduceMessages):
    """Logs the start of each sum, and the wait for it."""

    def __init__(self, *args: Any, name: str, log: list[str], **options: Any) -> None:
        super().__init__(*args, **options)
        self._name, self._log = name, log

    def _start(self, rows: Rows, work: PartWork) -> PartWork:
        name = f"{self._name} {'forward' if rows == 'output' else 'backward'}"
        self._log.append(f"start {name}")
        wait = work._wait
        assert wait is not None

        def logged() -> None:
            self._log.append(f"wait {name}")
            wait()

        work._wait = logged
        return super()._start(rows, work)


def _data(group: dist.ProcessGroup, dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    """Input, both weights, the first bias and the output gradient."""
    own = torch.Generator().manual_seed(seed * 64 + 1 + dist.get_rank(group))
    same = torch.Generator().manual_seed(seed * 64)
    x, dy = (torch.randn(SEQUENCE, 4, K, generator=same).to(dtype) for _ in range(2))
    shapes = ((F, K), (K, F), (F,))
    return [x, *(torch.randn(*shape, generator=own).to(dtype) for shape in shapes), dy]


def _reference(data: list[torch.Tensor], group: dist.ProcessGroup, blocks: int) -> list[torch.Tensor]:
    *tensors, dy = data
    x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in tensors)
    y = x
    for _ in range(blocks):
        middle = functional.relu(reference.copy_linear(y, w1, bias, group=group))
        y = y + reference.linear_all_reduce(middle, w2, group=group)
    y.backward(dy)
    return [y.detach(), *(leaf.grad for leaf in (x, w1, w2, bias))]  # type: ignore[list-item]


def pipelined(
    x: torch.Tensor,
    weights: list[torch.Tensor],
    group: dist.ProcessGroup,
    into: list[torch.Tensor | None],
    log: list[str] | None = None,
    blocks: int = 2,
) -> torch.Tensor:
    """`y + row(relu(column(y)))` once or twice, both halves in turn, as a caller of these ops does it."""
    w1, w2, bias = weights
    gradients = DeferredWgrad()
    buffer_pool = BufferPool()
    values = list(x.chunk(2, dim=1))
    slots = [reserve_slot()]
    for block in range(1, blocks + 1):
        on_way = []
        for name, value in zip("ab", values, strict=True):
            slot = slots[-1]
            slots.append(reserve_slot())
            options: dict[str, Any] = {"num_wgrads": None if (name, block) == ("a", 1) else 0}
            if log is None:
                messages = AllReduceMessages(group, buffer_pool, gradients, **options)
            else:
                messages = Logged(group, buffer_pool, gradients, name=f"{name}{block}", log=log, **options)
            of_first, of_second = (WgradTarget(main_grad, None, buffer_pool) for main_grad in into)
            inside = part_input(value.contiguous(), messages, slot)
            middle = functional.relu(column_part(inside, w1, bias, messages, of_first))
            on_way.append((value, row_part(middle, w2, messages, of_second), messages))
        values = [value + part_output(output, messages) for value, output, messages in on_way]
    return torch.cat(values, dim=1)


def against_reference(group: dist.ProcessGroup, dtype: torch.dtype, *, main_grad: bool = False) -> bytes:
    """Output and every gradient against the reference; the bits of what every rank must have alike."""
    bits = b""
    # The bound is that of one sum after another: rounding errors of a block are not amplified by a second one.
    blocks = 2 if dtype == torch.float32 else 1
    for seed in (1, 2):
        data = _data(group, dtype, seed)
        plain = _reference(data, group, blocks)
        exact = _reference([tensor.double() for tensor in data], group, blocks)
        x, w1, w2, bias = (tensor.clone().requires_grad_() for tensor in data[:-1])
        into = [torch.ones(w.shape, dtype=torch.float32) if main_grad else None for w in (w1, w2)]
        y = pipelined(x, [w1, w2, bias], group, into, blocks=blocks)
        y.backward(data[-1])
        wgrads = [w.grad if grad is None else grad - 1 for w, grad in zip((w1, w2), into, strict=True)]
        got = [y.detach(), x.grad, *wgrads, bias.grad]
        for name, mine, unfused, true in zip(NAMES, got, plain, exact, strict=True):
            assert mine is not None
            assert_close_to_exact(f"halves {name}", mine, unfused, true, true.abs().max() * torch.ones_like(true), 64)
        bits += y.detach().float().numpy().tobytes() + x.grad.float().numpy().tobytes()  # type: ignore[union-attr]
    return bits


def hands_over_once(group: dist.ProcessGroup) -> list[int]:
    """How often autograd gives each weight a gradient in one backward pass."""
    data = _data(group, torch.float32, 1)
    x, w1, w2, bias = (tensor.requires_grad_() for tensor in data[:-1])
    times = dict.fromkeys(("w1", "w2"), 0)
    for name, weight in (("w1", w1), ("w2", w2)):

        def count(_: Any, name: str = name) -> None:
            times[name] += 1

        weight.register_post_accumulate_grad_hook(count)
    pipelined(x, [w1, w2, bias], group, [None, None]).backward(data[-1])
    return list(times.values())


def order(group: dist.ProcessGroup) -> tuple[list[str], list[str]]:
    """What is begun and waited for, in forward and in backward."""
    data = _data(group, torch.float32, 1)
    x, w1, w2, bias = (tensor.requires_grad_() for tensor in data[:-1])
    log: list[str] = []
    y = pipelined(x, [w1, w2, bias], group, [None, None], log)
    forward = [line.replace(" forward", "") for line in log]
    log.clear()
    y.backward(data[-1])
    return forward, [line.replace(" backward", "") for line in log]


def frozen(group: dist.ProcessGroup, which: int) -> list[bool]:
    """Which leaves have a gradient where one of them needs none."""
    data = _data(group, torch.float32, 1)
    leaves = [tensor.requires_grad_(number != which) for number, tensor in enumerate(data[:-1])]
    pipelined(leaves[0], leaves[1:], group, [None, None]).backward(data[-1])
    return [leaf.grad is not None for leaf in leaves]


def without_gradients(group: dist.ProcessGroup) -> bool:
    """Evaluation gives the same."""
    data = _data(group, torch.float32, 1)
    expected = pipelined(data[0].requires_grad_(), data[1:-1], group, [None, None])
    with torch.no_grad():
        return bool(torch.equal(expected, pipelined(data[0], data[1:-1], group, [None, None])))
