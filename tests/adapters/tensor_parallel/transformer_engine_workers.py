"""Runs the overlapped forward on a layer that has only the attributes of a TransformerEngine linear."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import IN, OPS, OUT, TENSOR, make_data, start

STOCK = ("its own forward", None)


class Fields(torch.nn.Module):
    """A layer without computation: its stock forward returns `STOCK`."""

    def __init__(self, group: dist.ProcessGroup, kind: str, parallel: bool, skip_bias_add: bool) -> None:
        super().__init__()
        self.config = SimpleNamespace(fp8=None, tp_comm_overlap=False)
        self.tp_group, self.tp_size, self.parallel_mode = group, group.size(), kind
        self.sequence_parallel, self.fuse_wgrad_accumulation, self.fsdp_group = parallel, False, None
        self.weight_names, self.use_bias, self.te_return_bias = ["weight"], True, skip_bias_add
        shape = (OUT // group.size(), IN) if kind == "column" else (OUT, IN // group.size())
        generator = torch.Generator().manual_seed(41 + group.rank())
        self.weight = torch.nn.Parameter(torch.randn(shape, generator=generator))
        # A row-parallel bias is the same on all ranks.
        generator = torch.Generator().manual_seed(53 + group.rank() * (kind == "column"))
        self.bias = torch.nn.Parameter(torch.randn(shape[0], generator=generator))

    def forward(self, x: torch.Tensor) -> Any:
        return STOCK


def against_reference(group: dist.ProcessGroup, kind: str, parallel: bool, skip_bias_add: bool) -> list[str]:
    """Output and all gradients, compared with the reference; returns the directions that were counted."""
    start(group)
    # After the CPU adapter: these import Megatron.
    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
    from megatron_overlap.adapters.tensor_parallel.transformer_engine import overlapped

    x, dy = make_data(kind, torch.float32, 3 * group.size(), group.size(), group.rank(), parallel)
    with enable(OverlapConfig(tensor=TENSOR), strict=True) as session:
        layer = overlapped(Fields, kind, session, LinearAdapter.of(session))(group, kind, parallel, skip_bias_add)
        leaf = x.clone().requires_grad_()
        y, bias = layer(leaf)
        assert bias is (layer.bias if skip_bias_add else None)
        y.backward(dy)
        sites = session.report().sites
    got = [y.detach(), leaf.grad, layer.weight.grad, layer.bias.grad]
    other = Fields(group, kind, parallel, skip_bias_add)
    leaf = x.clone().requires_grad_()
    y = OPS[kind, not parallel](leaf, other.weight, group=group)
    y = y if skip_bias_add else y + other.bias
    y.backward(dy)
    expected = [y.detach(), leaf.grad, other.weight.grad, other.bias.grad]
    for name, a, b in zip(("y", "dx", "dw", "db"), got, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    return [site.direction for site, tally in sites.items() if tally.overlapped]


def falls_back(group: dist.ProcessGroup, field: str, value: Any) -> tuple[Any, list[str]]:
    """The output of a row layer with one attribute changed, and the reasons that were counted."""
    start(group)
    # After the CPU adapter: these import Megatron.
    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter
    from megatron_overlap.adapters.tensor_parallel.transformer_engine import overlapped

    with enable(OverlapConfig(tensor=TENSOR)) as session:
        layer = overlapped(Fields, "row", session, LinearAdapter.of(session))(group, "row", True, False)
        *path, last = field.split(".")
        setattr(functools.reduce(getattr, path, layer), last, value)
        rows = 4 * group.size() + (field == "rows")
        returned = layer(torch.zeros(rows, 2, IN // group.size()))
        reasons = [reason for tally in session.report().sites.values() for reason in tally.fallbacks]
    # Without a session the stock forward runs.
    assert layer(torch.zeros(4 * group.size(), 2, IN // group.size())) == STOCK
    return returned, reasons
