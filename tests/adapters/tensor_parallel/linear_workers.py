"""Runs Megatron's linear layers with and without the plugin, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, Session, enable
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.ops import reference
from tests.helpers.collectives import LateNodesTransport
from tests.helpers.numerics import assert_close_to_exact

TENSOR = {"method": "p2p", "chunks_per_rank": 2}
BATCH, IN, OUT = 2, 16, 24
OPS = {
    ("column", False): reference.all_gather_linear,
    ("row", False): reference.linear_reduce_scatter,
    ("column", True): reference.copy_linear,
    ("row", True): reference.linear_all_reduce,
}


def start(group: dist.ProcessGroup) -> str:
    """Adapts Megatron to the CPU and makes one tensor-parallel group of all ranks; returns Megatron's release."""
    if "megatron.core" not in sys.modules:
        from megatron_overlap.adapters import cpu

        cpu.install()
    from megatron.core import package_info, parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size(group))
    model_parallel_cuda_manual_seed(7)
    return str(package_info.__version__)


def make_layer(kind: str, dtype: torch.dtype, *, bias: bool = True, skip_bias_add: bool = False, **config: Any) -> Any:
    """A layer with the same random weights on every call."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    group = parallel_state.get_tensor_model_parallel_group()
    expert = config.pop("is_expert", False)
    settings: dict[str, Any] = {"sequence_parallel": True, **config}
    made = TransformerConfig(
        num_layers=1,
        hidden_size=IN,
        num_attention_heads=4,
        tensor_model_parallel_size=group.size(),
        use_cpu_initialization=True,
        params_dtype=dtype,
        **settings,
    )
    common: dict[str, Any] = {"config": made, "init_method": torch.nn.init.normal_, "bias": bias}
    common |= {"skip_bias_add": skip_bias_add, "is_expert": expert, "tp_group": group}
    torch.manual_seed(11)
    if kind == "column":
        layer = ColumnParallelLinear(IN, OUT, gather_output=False, **common)
    else:
        layer = RowParallelLinear(IN, OUT, input_is_parallel=True, **common)
    if bias:
        generator = torch.Generator().manual_seed(23 + group.rank() * (kind == "column"))
        with torch.no_grad():
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=generator))
    return layer


def hook_of_megatron[Hook: Callable[..., Any]](hook: Hook) -> Hook:
    """`hook` as one of Megatron, whose forward pre-hooks leave the input as it is."""
    hook.__module__ = "megatron.core.distributed.distributed_data_parallel"
    return hook


def make_data(kind: str, dtype: torch.dtype, sequence: int, ranks: int, rank: int, parallel: bool = True) -> Any:
    """This rank's input and output gradient, `[S, B, H]`."""
    generator = torch.Generator().manual_seed(31 + rank)
    own = sequence // ranks if parallel else sequence
    rows_in, rows_out = (own, sequence) if kind == "column" else (sequence, own)
    wide = (IN, OUT // ranks) if kind == "column" else (IN // ranks, OUT)
    x = torch.randn(rows_in, BATCH, wide[0], generator=generator).to(dtype)
    dy = torch.randn(rows_out, BATCH, wide[1], generator=generator).to(dtype)
    return x, dy


def step(layer: Any, x: torch.Tensor, dy: torch.Tensor, *, recompute: bool = False) -> dict[str, Any]:
    """Forward and backward; returns the output, the bias that was not added, and every gradient."""
    x = x.clone().requires_grad_()
    bias: list[Any] = []

    def forward(value: torch.Tensor) -> torch.Tensor:
        y, left = layer(value)
        bias[:] = [left]
        return y

    if recompute:
        from megatron.core.tensor_parallel import checkpoint

        # In the first pass the input requires no gradient, as where other layers come before.
        y = checkpoint(lambda value: forward(value.clone()), False, x)
    else:
        y = forward(x)
    y.backward(dy)
    grads = {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad}
    grads["dbias"] = None if layer.bias is None else layer.bias.grad
    return {**grads, "left": bias[0]}


def against_stock(
    group: dist.ProcessGroup,
    kind: str,
    dtype: torch.dtype,
    *,
    bias: bool = True,
    skip_bias_add: bool = False,
    frozen: bool = False,
    fused: bool = False,
    recompute: bool = False,
    plain: bool = False,
    nodes: int = 1,
    tensor: dict[str, Any] | None = None,
) -> list[tuple[str, str, int, int]]:
    """One layer with and without the plugin: output and gradients. Returns the overlapped calls by direction.

    `plain` is without sequence parallelism, on a sequence that does not divide. Inside each of several `nodes` copies
    carry the messages.
    """
    start(group)
    ranks, rank = group.size(), group.rank()
    x, dy = make_data(kind, dtype, 3 * ranks + plain, ranks, rank, parallel=not plain)
    made = {"bias": bias, "skip_bias_add": skip_bias_add, "sequence_parallel": not plain}

    def fresh() -> Any:
        layer = make_layer(kind, dtype, **made)
        # Stock gives the bias no gradient where the weight is frozen, so it is frozen as a whole.
        layer.requires_grad_(not frozen)
        return layer

    stock = step(fresh(), x, dy, recompute=recompute)
    layer = fresh()
    if fused:
        layer.gradient_accumulation_fusion = True
        layer.weight.main_grad = torch.ones(layer.weight.shape, dtype=torch.float32)
        layer.weight.grad_added_to_main_grad = False
    with enable(OverlapConfig(tensor=tensor or TENSOR), strict=True) as session, ExitStack() as opened:
        if nodes > 1:
            from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter

            transport = opened.enter_context(closing(LateNodesTransport(group, nodes, on_device=True)))
            session.adapter(LinearAdapter).transports[layer.tp_group] = transport
        mine = step(layer, x, dy, recompute=recompute)
        sites = session.report().sites
        dist.barrier(group)
    if fused:
        assert layer.weight.grad_added_to_main_grad
        assert mine["dw"].dtype == dtype, "what makes Megatron's data parallel hook run"
        mine["dw"] = layer.weight.main_grad - 1
    _compare(OPS[kind, plain], layer, x, dy, stock, mine, added=bias and not skip_bias_add, shift=float(fused))
    return [(site.op, site.direction, tally.overlapped, tally.moved_bytes) for site, tally in sites.items()]


def _compare(op: Any, layer: Any, x: Any, dy: Any, stock: Any, mine: Any, *, added: bool, shift: float) -> None:
    group = layer.tp_group
    shape = max(x.shape[:1], dy.shape[:1])
    bias = layer.bias.detach() if added else None
    exact = _double(op, x, layer.weight.detach(), bias, dy, group)
    size = _double(op, x.abs(), layer.weight.detach().abs(), None if bias is None else bias.abs(), dy.abs(), group)
    # What was in main_grad before is rounded with it.
    size["dw"] = size["dw"] + shift
    terms = {"y": IN, "dx": OUT, "dw": shape[0] * BATCH, "dbias": shape[0] * BATCH}
    for name, count in terms.items():
        assert (mine[name] is None) == (stock[name] is None), f"{name}: {mine[name]} {stock[name]}"
        if mine[name] is not None:
            expected, magnitude = (part[name].reshape(mine[name].shape) for part in (exact, size))
            assert_close_to_exact(f"{op.__name__} {name}", mine[name], stock[name], expected, magnitude, count)
    if stock["left"] is None:
        assert mine["left"] is None
    else:
        assert torch.equal(mine["left"], stock["left"])


def _double(op: Any, x: Any, w: Any, bias: Any, dy: Any, group: dist.ProcessGroup) -> dict[str, Any]:
    x, w = (tensor.double().requires_grad_() for tensor in (x.flatten(0, 1), w))
    bias = None if bias is None else bias.double().requires_grad_()
    y = op(x, w, bias, group=group)
    y.backward(dy.double().flatten(0, 1))
    return {"y": y.detach(), "dx": x.grad, "dw": w.grad, "dbias": None if bias is None else bias.grad}


def falls_back(group: dist.ProcessGroup, kind: str, what: str, strict: bool) -> tuple[list[str], str]:
    """A call that is not overlapped: returns the reasons and the error; without `strict` it must equal stock."""
    from megatron_overlap.counters import FallbackError

    start(group)
    config: dict[str, Any] = {}
    tensor = TENSOR
    sequence = 3 * group.size()
    options: dict[str, Any] = {"skip_bias_add": True}
    plain = what == "ring"
    if plain:
        config["sequence_parallel"] = False
    if what == "ring":
        tensor = {**TENSOR, "schedule": "ring"}
    elif what == "expert":
        config["is_expert"] = True
    elif what == "odd":
        sequence += 1
    x, dy = make_data(kind, torch.float32, sequence, group.size(), group.rank(), not plain and what != "expert")

    def fresh() -> Any:
        layer = make_layer(kind, torch.float32, **options, **config)
        if what == "deferred":
            layer.config.defer_embedding_wgrad_compute = True
            layer.config.wgrad_deferral_limit = 0
            layer.embedding_activation_buffer, layer.grad_output_buffer = [], []
            # Without it stock computes the gradient that it has just deferred.
            layer.gradient_accumulation_fusion = True
        if what == "offloaded":
            layer.config._cpu_offloading_context = SimpleNamespace(inside_context=True)
            layer.config.cpu_offloading = True
        return layer

    error = ""
    with enable(OverlapConfig(tensor=tensor), strict=strict) as session:
        layer = fresh()
        try:
            mine = step(layer, x, dy)
        except (FallbackError, RuntimeError, AssertionError) as raised:
            error = f"{type(raised).__name__}: {raised}"
        sites = session.report().sites
    reasons = [reason for tally in sites.values() for reason in tally.fallbacks]
    assert not any(tally.overlapped for tally in sites.values())
    if not error:
        stock = fresh()
        plain = step(stock, x, dy)
        for name, value in plain.items():
            assert (value is None and mine[name] is None) or torch.equal(value, mine[name]), name
        if what == "deferred":
            assert mine["dw"] is None
            assert len(layer.grad_output_buffer) == 1
    return reasons, error


def asks_for_fused(group: dist.ProcessGroup, kind: str, plain: bool, strict: bool) -> tuple[dict[str, int], str, str]:
    """A layer with `method: fused` without a GPU: returns counts and report; it must equal p2p."""
    from megatron_overlap.counters import FallbackError

    start(group)
    x, dy = make_data(kind, torch.float32, 3 * group.size(), group.size(), group.rank(), not plain)
    results = []
    for method in ("p2p", "fused"):
        with enable(OverlapConfig(tensor={**TENSOR, "method": method}), strict=strict) as session:
            try:
                results.append(step(make_layer(kind, torch.float32, sequence_parallel=not plain), x, dy))
            except FallbackError as error:
                return {}, "", str(error)
            report = session.report()
    # Sums differ by rounding: the order of received rows differs.
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)
    (tally,) = [tally for tally in report.sites.values() if tally.not_fused]
    assert tally.overlapped
    assert not any(tally.fallbacks for tally in report.sites.values())
    return tally.not_fused, report.render(width=250), ""


def disabled_leaves_nothing(group: dist.ProcessGroup) -> int:
    """Compares every attribute of Megatron before and after a session; returns how many the session replaced."""
    start(group)
    make_layer("row", torch.float32)
    before = _everything()
    with enable(OverlapConfig(tensor=TENSOR)):
        step(make_layer("column", torch.float32), *make_data("column", torch.float32, 12, group.size(), group.rank()))
        meanwhile = _everything()
    after = _everything()
    changed = [key for key, value in before.items() if meanwhile[key] is not value]
    for key, value in before.items():
        assert after[key] is value, key
    return len(changed)


def _everything() -> dict[tuple[str, str], object]:
    found: dict[tuple[str, str], object] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or not module_name.startswith("megatron."):
            continue
        for name, value in list(vars(module).items()):
            # Memory buffers and counters of Megatron's own change as it runs; functions and classes do not.
            if callable(value):
                found[module_name, name] = value
            if isinstance(value, type) and value.__module__.startswith("megatron."):
                found.update(((f"{module_name}.{name}", key), item) for key, item in vars(value).items())
    return found


def shared_input(group: dist.ProcessGroup) -> list[int]:
    """Two column layers of one input, one of another input, one of an input written into since: all equal to stock.

    Returns the bytes that all forwards together sent.
    """
    start(group)
    x, dy = make_data("column", torch.float32, 3 * group.size(), group.size(), group.rank())

    def both() -> dict[str, Any]:
        layers = [make_layer("column", torch.float32, bias=False) for _ in range(2)]
        with torch.no_grad():
            layers[1].weight.mul_(-2)
        leaf, other = (tensor.clone().requires_grad_() for tensor in (x, x + 1))
        y = layers[0](leaf)[0] + layers[1](leaf)[0]
        from_other = layers[0](other)[0]
        with torch.no_grad():
            other.add_(1)
            written = layers[0](other)[0]
        (y + from_other.detach()).backward(dy)
        made = {"y": y.detach(), "other": from_other.detach(), "written": written, "dx": leaf.grad}
        return {**made, "first": layers[0].weight.grad, "second": layers[1].weight.grad}

    stock = both()
    with enable(OverlapConfig(tensor=TENSOR), strict=True) as session:
        mine = both()
        sites = session.report().sites
    for name, value in stock.items():
        torch.testing.assert_close(mine[name], value, rtol=1e-5, atol=1e-5, msg=name)
    return [tally.moved_bytes for site, tally in sites.items() if site.direction.startswith("forward")]


def saved_bytes(group: dist.ProcessGroup) -> int:
    """Two column layers of one input and one of another: the bytes that autograd saves, without the weights."""
    start(group)
    x, _ = make_data("column", torch.float32, 3 * group.size(), group.size(), group.rank())
    layers = [make_layer("column", torch.float32, bias=False) for _ in range(3)]
    weights = {layer.weight.data_ptr() for layer in layers}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            saved[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with enable(OverlapConfig(tensor=TENSOR), strict=True) as session:
        leaf, other = (tensor.clone().requires_grad_() for tensor in (x, x))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = [layers[0](leaf)[0], layers[1](leaf)[0], layers[2](other)[0]]
            with torch.no_grad():
                layers[0](x)
        assert len(outputs) == 3
        (buffers,) = session.report().as_dict()["buffers"]
        assert buffers["ranks"] == f"ranks 0-{group.size() - 1}"
        assert buffers["bytes"]["gather"] == group.size() * x.nbytes
    return sum(saved.values())


def options_of_copies(group: dist.ProcessGroup, deterministic: bool | str) -> tuple[str, float | None, str, bool]:
    """How a session opens the copies of a group: channel, deadline, flight recorder, and whether hosts may differ.

    A group without copies is asked once for each channel, whoever opens its transport.
    """
    from megatron_overlap.adapters.diagnostics import consistency
    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter

    opened: list[Any] = []

    def open_copies(group: dist.ProcessGroup, options: Any, between: object) -> str:
        opened.extend((options, between is not None))
        return "no GPU"

    with (
        Session(OverlapConfig.model_validate({"timeout_s": 7.0, "deterministic": deterministic})) as session,
        patch.object(consistency, "open_copies", open_copies),
        patch.object(consistency.dist, "get_backend", return_value="nccl"),
        patch.object(consistency, "_checked_recorder", return_value="recorder"),
        patch.object(consistency, "open_transport", return_value=GlooTransport(group)) as opened_transport,
    ):
        adapter: Any = session.adapter(LinearAdapter)
        assert adapter.transport(group) is adapter.transport(group) is opened_transport.return_value
        session.transports.insert(group, opened_transport.return_value)
        assert consistency.open_device_transport(session, group) is opened_transport.return_value
        assert len([*session.transports.buffers()]) == 1
        assert set(session.counters.transports.values()) == {"NCCL: no GPU"}
        options, between = opened
        consistency.open_device_transport(session, group, "data")
        assert opened_transport.call_args.args[2] == "data"
    return options.channel, options.timeout_s, options.flight_recorder, between
