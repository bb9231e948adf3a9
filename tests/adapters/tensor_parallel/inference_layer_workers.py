"""Runs Megatron's `inference_optimized` linear layers in forward-only passes, with and without the plugin."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from tests.adapters.tensor_parallel.linear_workers import start
from tests.adapters.tensor_parallel.transformer_engine_workers import make_config

HIDDEN, BATCH, THRESHOLD = 32, 2, 64


def make_layer(group: dist.ProcessGroup, kind: str, bias: bool = False) -> Any:
    """A layer with the same random weights on every call, in evaluation mode."""
    from megatron.core.tensor_parallel import inference_layers as layers

    config = make_config(group, torch.float32, sequence_parallel=True, normalization="RMSNorm", add_bias_linear=bias)
    common: dict[str, Any] = {"config": config, "init_method": torch.nn.init.normal_, "bias": bias}
    common |= {"skip_bias_add": False, "is_expert": False, "tp_group": group}
    torch.manual_seed(11)
    if kind == "row":
        return layers.InferenceRowParallelLinear(2 * HIDDEN, HIDDEN, input_is_parallel=True, **common).eval()
    common["gather_output"] = False
    if kind == "column":
        return layers.InferenceColumnParallelLinear(HIDDEN, 2 * HIDDEN, **common).eval()
    layer = layers.InferenceLayerNormColumnParallelLinear(HIDDEN, 2 * HIDDEN, **common)
    layer.layer_norm_weight.data.uniform_(0.5, 2.0)
    return layer.eval()


def make_input(group: dist.ProcessGroup, kind: str, rows: int) -> torch.Tensor:
    """The rank's input of a call with so many gathered rows, `[S, B, H]`."""
    generator = torch.Generator().manual_seed(5 + group.rank())
    positions, features = rows // BATCH, 2 * HIDDEN
    if kind == "row":
        return torch.randn(positions, BATCH, features // group.size(), generator=generator)
    return torch.randn(positions // group.size(), BATCH, HIDDEN, generator=generator)


def calls(
    group: dist.ProcessGroup, kind: str, method: str, rows: list[int], settings: dict[str, Any], strict: bool = True
) -> tuple[dict[tuple[str, str], Any], list[str], list[str]]:
    """Calls with so many rows, compared with the stock layer.

    Args:
        group: the ranks.
        kind: `row`, `column` or `norm`.
        method: `overlap.tensor.method`.
        rows: of the calls.
        settings: attributes of the layer.
        strict: a fallback is an error.

    Returns:
        The counts, the reasons of fallbacks, and the candidates of the calls that ran through the autotuner.
    """
    start(group)
    from tests.adapters.tensor_parallel.forward_only_workers import counts, follow, threshold

    layer = make_layer(group, kind)
    for name, value in settings.items():
        setattr(layer, name, value)
    inputs = [make_input(group, kind, each) for each in rows]
    overlap = OverlapConfig.model_validate({"tensor": {"method": method}})
    with torch.no_grad(), threshold(THRESHOLD):
        stock = [layer(x) for x in inputs]
        with enable(overlap, strict=strict) as session:
            ran = follow(session)
            for x, (expected, _) in zip(inputs, stock, strict=True):
                y, bias = layer(x)
                assert bias is None
                torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-4)
            reasons = {reason for tally in session.report().sites.values() for reason in tally.fallbacks}
            return counts(session), sorted(reasons), ran


def training_mode(group: dist.ProcessGroup, kind: str) -> None:
    """A call in training mode without gradients equals stock: there the layer adds its bias."""
    start(group)
    layer, x = make_layer(group, kind, bias=True).train(), make_input(group, kind, 16)
    with torch.no_grad():
        layer.bias.fill_(3.0)
        expected, _ = layer(x)
        with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p"}}), strict=True):
            torch.testing.assert_close(layer(x)[0], expected, rtol=2e-5, atol=2e-4)


def with_mxfp8_weight(group: dist.ProcessGroup, kind: str) -> dict[str, str]:
    """What the report excludes after a call whose weight is MXFP8. Its GEMM, and so the stock path, needs a GPU."""
    start(group)
    from megatron.core.inference.quantization.mxfp8_tensor import MXFP8Tensor

    layer = make_layer(group, kind)
    weight = layer.weight.detach()
    del layer.weight
    layer.weight = MXFP8Tensor(weight.to(torch.float8_e4m3fn), torch.ones(len(weight), 1))
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p"}}), strict=True) as session, torch.no_grad():
        with contextlib.suppress(AssertionError, AttributeError, ImportError, RuntimeError, TypeError, ValueError):
            layer(make_input(group, kind, 16))
        return dict(session.report().not_overlapped)


def trains(group: dist.ProcessGroup, kind: str) -> dict[tuple[str, str], Any]:
    """The counts of one call in training mode."""
    start(group)
    from tests.adapters.tensor_parallel.forward_only_workers import counts

    layer = make_layer(group, kind).train()
    with enable(OverlapConfig.model_validate({"tensor": {"method": "p2p"}}), strict=True) as session:
        layer(make_input(group, kind, 16).requires_grad_())[0].sum().backward()
        return counts(session)
