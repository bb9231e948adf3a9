"""Worker functions: Megatron's attention layer and TransformerEngine models under context parallelism.

The functions import Megatron, so that only worker processes import it, after the CPU adapter.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.ops.reference import own_rows
from megatron_overlap.schedules import SequenceLayout
from tests.adapters.tensor_parallel.linear_workers import TENSOR, hook_of_megatron
from tests.adapters.tensor_parallel.transformer_engine_models import (
    POSITIONS,
    VOCABULARY,
    Model,
    assert_near_stock,
    calls_of,
    make_model,
)
from tests.helpers.reference import attention

HIDDEN, HEADS, KV_HEADS, SIZE = 64, 16, 8, 4


def start(group: dist.ProcessGroup) -> None:
    """Adapts Megatron and creates its groups."""
    if "megatron.core" not in sys.modules:
        from megatron_overlap.adapters import cpu

        cpu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size(group))
    model_parallel_cuda_manual_seed(7)


def make_config(**changes: Any) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "attention_dropout": 0.0,
        "add_bias_linear": True,
        "use_cpu_initialization": True,
        **changes,
    }
    return TransformerConfig(**settings)


def make_layer(**changes: Any) -> Any:
    """A self-attention layer with the same random weights on every call and rank."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.spec_utils import build_module

    spec = get_gpt_layer_local_spec(normalization="RMSNorm").submodules.self_attention
    torch.manual_seed(11)
    layer = build_module(spec, config=make_config(**changes), layer_number=2)
    assert layer.attn_mask_type is AttnMaskType.causal
    with torch.no_grad():
        torch.nn.init.normal_(layer.linear_qkv.bias)
    return layer


def frequencies(rows: int) -> torch.Tensor:
    """Rotary frequencies of the own rows, from Megatron's embedding."""
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(
        SIZE, rotary_percent=1.0, use_cpu_initialization=True, cp_group=parallel_state.get_context_parallel_group()
    )
    return embedding(rows)


def textbook(layer: Any, whole: torch.Tensor) -> torch.Tensor:
    """The layer on the whole sequence, on one rank, in plain torch."""
    qkv = whole @ layer.linear_qkv.weight.t() + layer.linear_qkv.bias
    per_key = qkv.unflatten(2, (KV_HEADS, HEADS // KV_HEADS + 2, SIZE))
    angle = torch.arange(whole.shape[0])[:, None] / 10000 ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = (table[:, None, None, :] for table in (angle.cos(), angle.sin()))

    def rotate(heads: torch.Tensor) -> torch.Tensor:
        left, right = heads.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    q, k, v = per_key[:, :, :, :-2].flatten(2, 3), per_key[:, :, :, -2], per_key[:, :, :, -1]
    return attention(rotate(q), rotate(k), v).flatten(2) @ layer.linear_proj.weight.t()


def compare_with_textbook(
    group: dist.ProcessGroup,
    *,
    fuse: bool = True,
    main_grad: bool = False,
    recompute: bool = False,
    hook: str = "",
    replaced: str = "",
    **changes: Any,
) -> list[str]:
    """Compares output, input gradient and summed weight gradients; returns the operations that ran.

    `hook`: a module with a backward hook.
    `replaced`: a module whose forward is replaced after the layer was built, on the instance or by another class.
    """
    start(group)
    size, rank = group.size(), group.rank()
    layout = SequenceLayout.zigzag(8 * size, size)
    generator = torch.Generator().manual_seed(5)
    whole, dwhole = (torch.randn(8 * size, 2, HIDDEN, generator=generator) for _ in range(2))
    ulysses = {"method": "p2p", "fuse_projections": fuse}
    with enable(OverlapConfig.model_validate({"ulysses": ulysses}), strict=True) as session:
        if recompute:
            changes |= {"recompute_granularity": "selective"}
        layer = make_layer(**changes).train()
        if hook:
            getattr(layer, hook).register_full_backward_hook(lambda *_: None)
        called: list[str] = []
        if replaced:
            module, how = getattr(layer, replaced.split()[0]), replaced.split()[1]
            kind = type(module)

            def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
                called.append(replaced)
                return kind.forward(self, *args, **kwargs)

            if how == "class":
                module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
            else:
                module.forward = functools.partial(forward, module)
        hooked: list[str] = []
        for name in ("linear_qkv", "linear_proj"):
            module = getattr(layer, name)
            module.register_forward_pre_hook(hook_of_megatron(lambda *_, name=name: hooked.append(name)))
            if main_grad:
                module.gradient_accumulation_fusion = True
                module.weight.main_grad = torch.ones(module.weight.shape)
                module.weight.grad_added_to_main_grad = False
        x = own_rows(whole, layout, rank).requires_grad_()
        y, bias = layer(x, None, rotary_pos_emb=frequencies(8 * size))
        assert bias is layer.linear_proj.bias
        y.backward(own_rows(dwhole, layout, rank))
        sites = session.report().sites
    assert hooked == ["linear_qkv", "linear_proj"], "the pre-hooks wait for parameters"
    assert called == [replaced] * bool(replaced)
    assert "forward" not in vars(layer), "disable() restores the layer"
    expected = whole.clone().requires_grad_()
    true = textbook(layer, expected)
    parameters = [layer.linear_qkv.weight, layer.linear_proj.weight, layer.linear_qkv.bias]
    dx, *dparameters = torch.autograd.grad(true, (expected, *parameters), dwhole)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(y, own_rows(true, layout, rank), **close)
    torch.testing.assert_close(x.grad, own_rows(dx, layout, rank), **close)
    for parameter, expected_grad in zip(parameters, dparameters, strict=True):
        if main_grad and parameter.dim() == 2:
            assert parameter.grad_added_to_main_grad
            got = parameter.main_grad - 1
        else:
            got = parameter.grad
        dist.all_reduce(got, group=group)
        torch.testing.assert_close(got, expected_grad, **close)
    return sorted({site.op for site in sites})


def layer_is_released(group: dist.ProcessGroup) -> bool:
    """Whether a layer with an instance attribute `forward` is freed without the garbage collector."""
    import weakref

    start(group)
    with enable(OverlapConfig.model_validate({"ulysses": {"method": "p2p"}})):
        layer = make_layer()
        assert "forward" in vars(layer)
        reference_to_layer = weakref.ref(layer)
        gc.disable()
        del layer
        gc.enable()
    return reference_to_layer() is None


def error_messages(group: dist.ProcessGroup) -> list[str]:
    """Error messages of layers and calls that Ulysses does not support; the first one is of stock Megatron."""
    from megatron_overlap.adapters.ulysses.core_attention import UlyssesError

    start(group)
    messages = []
    try:
        make_layer()
    except AssertionError as error:
        messages.append(str(error))
    with enable(OverlapConfig.model_validate({"ulysses": {"method": "p2p"}})):
        for changes in (
            {"attention_dropout": 0.1},
            {"window_size": (4, 0)},
            {"num_attention_heads": 3, "num_query_groups": 3, "kv_channels": 4},
        ):
            try:
                make_layer(**changes)
            except UlyssesError as error:
                messages.append(str(error))
        core = make_layer().core_attention
        q = torch.randn(4, 1, HEADS, SIZE)
        k = torch.randn(4, 1, KV_HEADS, SIZE)
        for call in (
            {"packed_seq_params": object()},
            {"attention_bias": torch.zeros(1)},
            {"key": torch.cat([k, k]), "value": torch.cat([k, k])},
        ):
            try:
                core(**{"query": q, "key": k, "value": k, "attention_mask": None, **call})
            except UlyssesError as error:
                messages.append(str(error))
    return messages


@functools.cache
def _megatron_groups(tensor: int, context: int) -> dict[str, Any]:
    """The state of `parallel_state` for a layout. Made once: groups of gloo have threads and are never freed."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    return _state_of(parallel_state)


def _state_of(parallel_state: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(parallel_state).items() if name.startswith("_") and name.isupper()}


@contextlib.contextmanager
def megatron_groups(tensor: int, context: int) -> Iterator[None]:
    """Megatron's groups of another layout inside the context."""
    from megatron.core import parallel_state

    before = _state_of(parallel_state)
    vars(parallel_state).update(_megatron_groups(tensor, context))
    try:
        yield
    finally:
        vars(parallel_state).update(before)


def make_te_model(case: Model, tensor: int, context: int, main_grad: bool = False) -> Any:
    """A model of TransformerEngine layers; with `main_grad` the attention adds weight gradients to that buffer."""
    from megatron.core import parallel_state

    config = {"context_parallel_size": context, "sequence_parallel": tensor > 1, **case.config}
    group = parallel_state.get_tensor_model_parallel_group()
    model = make_model(group, replace(case, config=config), case.dtype)
    for layer in model.decoder.layers if main_grad else ():
        for linear in (layer.self_attention.linear_qkv, layer.self_attention.linear_proj):
            linear.fuse_wgrad_accumulation = True
            linear.weight.main_grad = torch.zeros(linear.weight.shape)
            linear.weight.grad_added_to_main_grad = False
    return model


def run_te_model(model: Any, case: Model) -> dict[str, torch.Tensor]:
    """Mean loss over all positions, and every gradient."""
    from megatron.core import parallel_state

    from scripts.pretrain_decoder import positions_of_rank

    context = parallel_state.get_context_parallel_group()
    ids = torch.randint(0, VOCABULARY, (case.batch, POSITIONS), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(POSITIONS).expand(case.batch, -1)
    if context.size() > 1:
        ids, positions = (positions_of_rank(each, context.rank(), context.size()) for each in (ids, positions))
    loss = model(ids, positions, None, labels=ids).float().sum() / (case.batch * POSITIONS)
    loss.backward()
    return gradients(model, loss)


def gradients(model: Any, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Loss and every gradient, fp32, summed over context ranks.

    Gradients of parameters that Megatron marks `sequence_parallel` are also summed over tensor-parallel ranks.
    """
    from megatron.core import parallel_state

    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        used = getattr(parameter, "main_grad", None)
        if used is not None:
            assert parameter.grad_added_to_main_grad
        found[name] = (parameter.grad if used is None else used).float()
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(found[name], group=parallel_state.get_tensor_model_parallel_group())
    for value in found.values():
        dist.all_reduce(value, group=parallel_state.get_context_parallel_group())
    return found


def te_model_against_stock(
    group: dist.ProcessGroup, case: Model, tensor: int = 1, main_grad: bool = False
) -> tuple[dict[str, int], list[str]]:
    """A model with two context ranks, equal to stock TransformerEngine with one. Returns as `calls_of`."""
    wide = replace(case, dtype=torch.float32)
    with megatron_groups(tensor, 1):
        model = make_te_model(case, tensor, 1)
        stock = run_te_model(model, case)
        exact_model = make_te_model(wide, tensor, 1)
        exact_model.load_state_dict(model.state_dict(), strict=False)
        exact = run_te_model(exact_model, wide)
    config = OverlapConfig.model_validate({"tensor": TENSOR, "ulysses": {"method": "p2p"}})
    with megatron_groups(tensor, 2), enable(config, strict=True) as session:
        model = make_te_model(case, tensor, 2, main_grad)
        mine = run_te_model(model, case)
        report = session.report()
        for layer in model.decoder.layers:
            attention = layer.self_attention
            linears = (attention.linear_qkv, attention.linear_proj)
            assert not any(linear.is_first_microbatch for linear in linears)
            core = attention.core_attention
            assert core.cp_group.size() == 2
            assert core.num_gqa_groups_per_partition == core.num_gqa_groups // tensor
    assert_near_stock(mine, stock, exact, case.dtype)
    return calls_of(report)


def te_fallbacks(group: dist.ProcessGroup, changes: dict[str, Any], strict: bool) -> tuple[str, list[str]]:
    """The error of a model that Ulysses does not support, on the CPU, and the reasons that were counted."""
    config = OverlapConfig.model_validate({"ulysses": {"method": "p2p"}})
    case = Model("llama", config=changes)
    with megatron_groups(1, 2), enable(config, strict=strict) as session:
        try:
            run_te_model(make_te_model(case, 1, 2), case)
        except Exception as error:
            return f"{type(error).__name__}: {error}", calls_of(session.report())[1]
    return "", []


def te_fallback_calls(group: dist.ProcessGroup) -> list[str]:
    """Calls that Ulysses does not support reach TransformerEngine with its context parallelism; returns the reasons.

    Tensors without data stand for those of a GPU, and the method of TransformerEngine is recorded.
    """
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType
    from transformer_engine.pytorch import DotProductAttention

    calls: list[Any] = []

    def record(self: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append(self.cp_group.size())
        return query.flatten(2)

    config = OverlapConfig.model_validate({"ulysses": {"method": "p2p"}})
    q, k = (torch.empty(4, 1, heads, 4, device="meta") for heads in (4, 4))
    causal, stock = AttnMaskType.causal, DotProductAttention.forward
    with megatron_groups(1, 2), enable(config) as session:
        core = make_te_model(Model("llama"), 1, 2).decoder.layers[0].self_attention.core_attention
        DotProductAttention.forward = record
        try:
            core(q, k, k, None, causal, packed_seq_params=PackedSeqParams(qkv_format="thd"))
            core(q, k, k, None, causal, attention_bias=torch.zeros(1))
            core(q, k, k, None, AttnMaskType.no_mask)
            core(q, torch.cat([k, k]), torch.cat([k, k]), None, causal)
            core(q, k, k[..., :2], None, causal)
        finally:
            DotProductAttention.forward = stock
        assert calls == [2] * 5
        return calls_of(session.report())[1]
