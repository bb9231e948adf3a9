"""Runs Megatron's transformer layers on the stock path and with batch overlap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.utils.checkpoint

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.comm import PART_CHANNELS
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.ops.tensor_parallel.part_messages import PartGathers
from megatron_overlap.session import Session
from tests.adapters.tensor_parallel.linear_workers import hook_of_megatron, start
from tests.helpers.collectives import LateCollectives, device_copies
from tests.ops.tensor_parallel.batch_overlap_workers import Logged
from tests.ops.tensor_parallel.part_messages_workers import Logged as LoggedTransport

HIDDEN, SEQUENCE = 16, 9
BATCH_OVERLAP = {"tensor": {"method": "p2p", "split": "batch"}}


def make_config(group: dist.ProcessGroup, dtype: torch.dtype, **settings: Any) -> Any:
    """The configuration of two small layers without dropout."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, **settings},
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        tensor_model_parallel_size=group.size(),
        params_dtype=dtype,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )


def make_block(group: dist.ProcessGroup, dtype: torch.dtype, *, te: bool = False, **settings: Any) -> Any:
    """A block of two layers of the local spec, or TransformerEngine's, and a norm; the same weights on every call."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    from scripts.pretrain_decoder import layer_specification

    config = make_config(group, dtype, **settings)
    torch.manual_seed(11)
    block = TransformerBlock(config, layer_specification(config, use_te=te))
    generator = torch.Generator().manual_seed(23)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return block.to(dtype)


def _step(
    block: Any,
    x: torch.Tensor,
    dy: torch.Tensor,
    rows: int,
    masks: int,
    alone: bool,
    beside: dict[str, Any],
    frozen_input: bool = False,
) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_(not frozen_input)
    # Without a mask Megatron makes a causal one.
    mask = torch.ones(rows, rows, dtype=torch.bool).triu(1).expand(masks, 1, rows, rows).clone() if masks else None
    if mask is not None and masks > 1:
        mask[-1, :, 1:, 0] = True  # one mask differs
    if alone:
        y = x
        for layer in block.layers:
            y = 1.0 * layer(hidden_states=y, attention_mask=mask, **beside)[0]  # read outside of the layers
    else:
        y = block(hidden_states=x, attention_mask=mask, **beside)
    y.backward(dy)
    assert getattr(block, "seen", [True]) == [True]
    grads = {name: parameter.grad for name, parameter in block.named_parameters() if parameter.grad is not None}
    sum_over_rows(block)
    return {"y": y.detach(), **({} if frozen_input else {"dx": x.grad}), **grads}  # type: ignore[dict-item]


def sum_over_rows(model: Any, group: dist.ProcessGroup | None = None) -> None:
    """Sums the gradients of parameters that a rank uses on its own rows, as Megatron does before the optimizer step."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False) and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=group)


def against_stock(
    group: dist.ProcessGroup,
    *,
    dtype: torch.dtype = torch.float32,
    batch: int = 4,
    masks: int = 1,
    alone: bool = False,
    beside: dict[str, Any] | None = None,
    prepare: str = "nothing",
    split: str = "batch",
    split_at: str | float = "auto",
    recompute_output: str = "skip",
    odd: bool = False,
    rotary: int = 0,
    frozen_input: bool = False,
    carried_by: Literal["messages", "collectives", "copies"] = "messages",
    **settings: Any,
) -> tuple[dict[tuple[str, str], int], list[str]]:
    """Output and all gradients, equal to stock. Returns calls by op and direction, and the reasons of fallbacks.

    `alone`: the layers are called without a block. `beside`: further arguments. `rotary`: sequences with rotary angles
    of their own. `odd`: each rank has one row more. `frozen_input`: it requires no gradient. `carried_by`: collectives,
    as over NCCL; copies carry the all-gathers then.
    """
    start(group)
    from megatron.core import parallel_state

    from megatron_overlap.adapters.tensor_parallel.dispatch import LinearAdapter

    if "activation_func" in settings:
        settings["activation_func"] = getattr(torch.nn.functional, settings["activation_func"])
    sharded = settings.get("sequence_parallel")
    generator = torch.Generator().manual_seed(31 + (dist.get_rank(group) if sharded else 0))
    own = 2 * SEQUENCE // group.size() + odd if sharded else SEQUENCE
    rows = own * group.size() if sharded else SEQUENCE
    beside = dict(beside or {})
    if rotary:
        beside["rotary_pos_emb"] = torch.randn(
            rows, rotary, 1, HIDDEN // 4, generator=torch.Generator().manual_seed(37)
        )
    x, dy = (torch.randn(own, batch, HIDDEN, generator=generator).to(dtype) for _ in range(2))

    def run() -> dict[str, torch.Tensor]:
        block = make_block(group, dtype, **settings)
        PREPARE[prepare](block)
        return _step(block, x, dy, rows, masks, alone, beside, frozen_input)

    stock = run()
    tensor = {"method": "p2p", "split": split, "split_at": split_at, "recompute_output": recompute_output}
    with (
        patch.object(PartGathers, "carries", return_value=True),
        enable(OverlapConfig.model_validate({"tensor": tensor})) as session,
    ):
        used = parallel_state.get_tensor_model_parallel_group()
        for channel in PART_CHANNELS if carried_by != "messages" else ():
            session.transports.insert(used, LateCollectives(group), channel)
        if carried_by == "copies":
            copies = device_copies(HostGroup(group))
            session.transports.insert(used, copies, "copies")
            session.adapter(LinearAdapter).transports[used] = copies
        mine = run()
        if carried_by != "messages":
            assert all(session.transports.find(used, channel)._num_p2p_works for channel in PART_CHANNELS)
        if carried_by == "copies":
            assert sum(name.startswith("part") for name in copies.buffer_pool.sizes()) == PartGathers.NUM_BUFFERS
        sites = session.report().sites
    tolerance = 1e-5 if dtype == torch.float32 else 6e-2
    for name, value in stock.items():
        scale = float(value.abs().max())
        torch.testing.assert_close(mine[name], value, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}")
    assert sorted(mine) == sorted(stock)
    calls: dict[tuple[str, str], int] = {}
    for site, tally in sites.items():
        calls[site.op, site.direction] = (
            calls.get((site.op, site.direction), 0) + tally.overlapped + tally.not_communicating
        )
    return calls, [reason for site, tally in sites.items() if site.op == "batch_overlap" for reason in tally.fallbacks]


def bits_of_skipped_outputs(group: dist.ProcessGroup, split: str, dtype: torch.dtype) -> bool:
    """Whether the gradients have the same bits with recomputed outputs skipped and computed."""
    start(group)
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    generator = torch.Generator().manual_seed(41 + dist.get_rank(group))
    x, dy = (torch.randn(2, 2, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    results = []
    for recompute_output in ("skip", "compute"):
        block = make_block(group, dtype, sequence_parallel=True, **full)
        tensor = {"method": "p2p", "split": split, "recompute_output": recompute_output}
        with enable(OverlapConfig.model_validate({"tensor": tensor, "deterministic": True})):
            results.append(_step(block, x, dy, 2 * group.size(), 0, False, {}))
    skipped, computed = results
    return skipped.keys() == computed.keys() and all(torch.equal(skipped[name], computed[name]) for name in skipped)


def order(group: dist.ProcessGroup, prepare: str = "nothing") -> tuple[list[str], list[str]]:
    """The order of starts and waits of the all-reduces of two layers, in forward and in backward."""
    start(group)
    from megatron_overlap.adapters.tensor_parallel import split_layer

    log: list[str] = []
    names = iter([f"{half}{part}" for part in "1234" for half in "ab"])

    def logged(*args: Any, **options: Any) -> Logged:
        return Logged(*args, name=next(names), log=log, **options)

    with patch.object(split_layer, "AllReduceMessages", logged):
        block = make_block(group, torch.float32)
        PREPARE[prepare](block)
        with enable(OverlapConfig.model_validate(BATCH_OVERLAP)):
            x = torch.randn(SEQUENCE, 2, HIDDEN, requires_grad=True)
            mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
            y = block(hidden_states=x, attention_mask=mask)
            forward = [line.replace(" forward", "") for line in log]
            log.clear()
            y.sum().backward()
    return forward, [line.replace(" backward", "") for line in log]


def _log_parts(session: Session, group: dist.ProcessGroup, log: list[str], arrives_at: int | None = None) -> None:
    """Logs the messages of both parts of a split micro-batch."""
    for part in ("a", "b"):
        logged = LoggedTransport(GlooTransport(group), part, log, arrives_at)
        session.transports.insert(group, logged, f"part {part}")


def sharded_order(group: dist.ProcessGroup, **settings: Any) -> tuple[list[str], list[str]]:
    """The order of starts and waits of the messages of two layers under sequence parallelism.

    In backward also the end of each core attention.
    """
    start(group)
    log: list[str] = []
    block = make_block(group, torch.float32, sequence_parallel=True, **settings)
    with enable(OverlapConfig.model_validate(BATCH_OVERLAP)) as session:
        tensor_group = block.layers[0].self_attention.linear_proj.tp_group
        _log_parts(session, tensor_group, log)

        def log_backward(_: Any, operands: tuple[torch.Tensor, ...]) -> None:
            if operands[0].requires_grad:  # not in the first pass of activation recomputation
                operands[0].register_hook(lambda _: log.append("attention"))

        for layer in block.layers:
            layer.self_attention.core_attention.register_forward_pre_hook(hook_of_megatron(log_backward))
        x = torch.randn(2, 2, HIDDEN, requires_grad=True)
        rows = 2 * group.size()
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
        y = block(hidden_states=x, attention_mask=mask)
        forward = log.copy()
        log.clear()
        y.sum().backward()
    return forward, log


def attention_order(group: dist.ProcessGroup, *, arrives_at: int, **settings: Any) -> list[str]:
    """The starts of gathers and the ends of core attention and its softmax, in forward of two layers."""
    start(group)
    log: list[str] = []
    block = make_block(group, torch.float32, sequence_parallel=True, **settings)
    with enable(OverlapConfig.model_validate(BATCH_OVERLAP)) as session:
        tensor_group = block.layers[0].self_attention.linear_proj.tp_group
        _log_parts(session, tensor_group, log, arrives_at)
        for layer in block.layers:
            core = layer.self_attention.core_attention
            core.scale_mask_softmax.register_forward_hook(lambda *_: log.append("softmax"))
            core.register_forward_hook(lambda *_: log.append("attention"))
        rows = 2 * group.size()
        mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
        y = block(hidden_states=torch.randn(2, 2, HIDDEN, requires_grad=True), attention_mask=mask)
        forward = [each for each in log if each in ("softmax", "attention", "start a input", "start b input")]
        y.sum().backward()
        for layer in block.layers:
            softmax = layer.self_attention.core_attention.scale_mask_softmax
            assert len(softmax._forward_hooks) == 1
            assert not softmax._forward_pre_hooks
    assert all(parameter.grad is not None for parameter in block.parameters())
    return forward


def core_attention_calls(group: dist.ProcessGroup, split: str) -> list[int]:
    """Calls of the core attention of two layers in forward and backward of two steps, with selective recomputation."""
    start(group)
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    calls: list[int] = []
    original = DotProductAttention.forward

    def counted(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls[-1] += 1
        return original(self, *args, **kwargs)

    block = make_block(group, torch.float32, sequence_parallel=True, recompute_granularity="selective")
    tensor = {"method": "p2p", "split": split}
    with (
        enable(OverlapConfig.model_validate({"tensor": tensor}), strict=True),
        patch.object(DotProductAttention, "forward", counted),
    ):
        for _ in range(2):
            calls.append(0)
            y = block(hidden_states=torch.randn(2, 2, HIDDEN, requires_grad=True), attention_mask=None)
            calls.append(0)
            y.sum().backward()
    return calls


def extracted_is_finite(group: dist.ProcessGroup) -> bool:
    """Whether the first layer's output is finite where the block returns it too. Before, the block ran without that."""
    start(group)
    block = make_block(group, torch.float32)
    x = torch.randn(SEQUENCE, 2, HIDDEN, requires_grad=True)
    with enable(OverlapConfig.model_validate(BATCH_OVERLAP), strict=True):
        block(hidden_states=x, attention_mask=None)
        _, (first,) = block(hidden_states=x, attention_mask=None, extract_layer_indices={0})
    return bool(first.isfinite().all())


def _gathered_late(mlp: Any) -> None:
    """As Megatron's --overlap-param-gather: a layer's weight is there when its hook has run, and NaN before."""
    for layer in (mlp.linear_fc1, mlp.linear_fc2):
        weight = layer.weight.detach().clone()
        layer.weight.data.fill_(float("nan"))

        def wait(layer: Any, _: Any, weight: torch.Tensor = weight) -> None:
            layer.weight.data.copy_(weight)

        layer.register_forward_pre_hook(hook_of_megatron(wait))


def _late(block: Any) -> None:
    for layer in block.layers:
        _gathered_late(layer.mlp)
        # Megatron registers such a hook on every module. It gets no keyword arguments.
        layer.register_forward_pre_hook(hook_of_megatron(lambda _, __: None))


def _hook(block: Any) -> None:
    """A hook reads the output of the first layer."""

    def check_finite(_: Any, __: Any, output: tuple[torch.Tensor, Any]) -> None:
        assert output[0].isfinite().all()

    block.layers[0].register_forward_hook(check_finite)


def _backward_hook(block: Any) -> None:
    """A hook reads the gradient of the first layer's output."""
    block.seen = []
    block.layers[0].register_full_backward_hook(lambda *_: block.seen.append(True))


def _linear_hook(block: Any) -> None:
    """A hook reads the gradients of a linear layer, as `--save-dgrads-interval` does."""
    block.layers[0].mlp.linear_fc1.register_full_backward_hook(lambda *_: None)


def _scaled(name: str, *, before: bool = False) -> Any:
    """A hook of the user changes the output, or the input, of a module of each layer."""

    def prepare(block: Any) -> None:
        for layer in block.layers:
            module = layer.get_submodule(name)
            if before:
                module.register_forward_pre_hook(lambda _, given: (given[0] * 0.5, *given[1:]))
            else:
                module.register_forward_hook(lambda _, __, output: (output[0] * 0.5, *output[1:]))

    return prepare


def _pre_hook(block: Any) -> None:
    """A hook reads the keyword arguments of the second layer."""

    def check_finite(_: Any, __: Any, given: dict[str, Any]) -> None:
        assert given["hidden_states"].isfinite().all()

    block.layers[1].register_forward_pre_hook(check_finite, with_kwargs=True)


def _first_unsupported(block: Any) -> None:
    """Batch overlap does not support the first layer."""
    block.layers[0].recompute_mlp = True


def _second_unsupported(block: Any) -> None:
    """Batch overlap does not support the second layer."""
    block.layers[1].recompute_mlp = True


def _changes_late(block: Any) -> None:
    """Batch overlap does not support the second layer from its call on, as a layer whose own context is fp8."""
    block.layers[1].register_forward_pre_hook(lambda layer, _: setattr(layer, "recompute_mlp", True))


def _after_a_block(block: Any) -> None:
    """The layers ran in a block before."""
    with torch.no_grad():
        block(hidden_states=torch.zeros(2, 2, HIDDEN), attention_mask=None)


def _frozen_below(block: Any) -> None:
    """Only the weights of the last layer's linear layers, and the norm after it, are trained."""
    for name, parameter in block.named_parameters():
        trained = name.startswith("final_layernorm") or (name.startswith("layers.1.") and "linear" in name)
        parameter.requires_grad_(trained)


def _own_residual(block: Any) -> None:
    """Another function than Megatron's adds the output of the MLP."""
    for layer in block.layers:
        layer.mlp_bda = partial(layer.mlp_bda)


def _another_mlp(block: Any) -> None:
    """The MLP is a subclass of Megatron's."""
    for layer in block.layers:
        layer.mlp.__class__ = type("Other", (type(layer.mlp),), {})


def _checkpointed(kind: str, *, reentrant: bool) -> Callable[[Any], None]:
    """`torch.utils.checkpoint` recomputes each layer, or its MLP: by a `forward` of the module."""

    def prepare(block: Any) -> None:
        for layer in block.layers:
            module = layer.mlp if kind == "mlp" else layer
            module.forward = partial(_recomputed, module.forward, reentrant)

    return prepare


def _recomputed(forward: Any, reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    args = args or (kwargs.pop("hidden_states"),)
    return torch.utils.checkpoint.checkpoint(partial(forward, **kwargs), *args, use_reentrant=reentrant)


def _checkpoint_within(block: Any) -> None:
    """`torch.utils.checkpoint` recomputes each layer: by a class that calls the forward of Megatron's."""
    kind = type(block.layers[0])

    def forward(self: Any, **kwargs: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(partial(kind.forward, self), use_reentrant=False, **kwargs)

    for layer in block.layers:
        layer.__class__ = type("Checkpointed", (kind,), {"forward": forward})


def _another_layer(block: Any) -> None:
    """The layer is a subclass of Megatron's that scales the output of its MLP."""
    kind = type(block.layers[0])

    def forward_mlp(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return 1.5 * kind._forward_mlp(self, x, *args, **kwargs)

    for layer in block.layers:
        layer.__class__ = type("Scaled", (kind,), {"_forward_mlp": forward_mlp})


def _cross_attention(block: Any) -> None:
    """A cross-attention that returns its input."""

    class Other(torch.nn.Module):
        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            return x

    for layer in block.layers:
        layer.cross_attention = Other()


def _fp8(block: Any) -> None:
    """TransformerEngine recomputes the layers."""
    _setting("recompute_granularity", "full")(block)
    _setting("fp8", "hybrid")(block)


def _setting(name: str, value: Any) -> Any:
    """A setting that needs TransformerEngine; layers of the local spec do not read it."""
    return lambda block: setattr(block.config, name, value)


PREPARE = {
    "another MLP": _another_mlp,
    "another layer": _another_layer,
    "checkpointed layer": _checkpointed("layer", reentrant=True),
    "checkpointed MLP": _checkpointed("mlp", reentrant=False),
    "checkpoint within": _checkpoint_within,
    "cross-attention": _cross_attention,
    "fp8": _fp8,
    "offloading": _setting("cpu_offloading", True),
    "nothing": lambda block: None,
    "late": _late,
    "own residual": _own_residual,
    "after a block": _after_a_block,
    "frozen below": _frozen_below,
    "hook": _hook,
    "pre-hook": _pre_hook,
    "hook of a linear layer": _linear_hook,
    "pre-hook of a linear layer": _scaled("mlp.linear_fc1", before=True),
    "hook of the MLP": _scaled("mlp"),
    "pre-hook of the MLP": _scaled("mlp", before=True),
    "hook of the attention": _scaled("self_attention"),
    "backward hook": _backward_hook,
    "first unsupported": _first_unsupported,
    "second unsupported": _second_unsupported,
    "changes late": _changes_late,
}
