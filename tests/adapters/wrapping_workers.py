"""Runs replaced methods inside a module that `torch.compile` traces. Needs no Megatron."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap.adapters.wrapping import untraced
from megatron_overlap.ops import all_gather_linear, linear_reduce_scatter


class Layer(torch.nn.Module):
    """A column- and a row-parallel linear with an activation between them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(dist.get_rank(group))
        self.first = torch.nn.Parameter(torch.randn(12, 8, generator=generator))
        self.second = torch.nn.Parameter(torch.randn(8, 12, generator=generator))
        self.group = group
        self.traced = False

    @untraced
    def column(self, x: torch.Tensor) -> torch.Tensor:
        self.traced |= torch.compiler.is_compiling()
        return all_gather_linear(x, self.first, group=self.group)

    @untraced
    def row(self, x: torch.Tensor) -> torch.Tensor:
        self.traced |= torch.compiler.is_compiling()
        return linear_reduce_scatter(x, self.second, group=self.group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`row(silu(column(2 x))) + 1`"""
        return self.row(torch.nn.functional.silu(self.column(x * 2))) + 1


def compiled(group: dist.ProcessGroup) -> tuple[bool, int, list[bool]]:
    """Whether an op was traced, how many graphs were made around them, and which results equal the uncompiled ones."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    layer = Layer(group)
    again = torch.compile(layer, backend=backend)
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(9))
    results = []
    for run in (layer, again):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, layer.first.grad, layer.second.grad])
    equal = [torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip(*results, strict=True)]
    return layer.traced, len(graphs), equal
