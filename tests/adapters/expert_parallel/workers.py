"""Runs Megatron's mixture-of-experts layer with and without the plugin, on the same data.

Megatron is imported inside the functions: in a worker, after the CPU adapter, and never in the test's own process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.comm.symmetric.copies import CopyTransport
from scripts.kernels.cpu_backend import CpuBackend

HIDDEN, FFN, ROWS = 64, 96, 37
SHARED = {"moe_shared_expert_intermediate_size": 48}


@dataclass(frozen=True)
class MoECase:
    """One layer and how ranks share it.

    Attributes:
        spec: `local`, `te` (sequential experts of TransformerEngine linears) or `grouped`.
        main_grad: gradients are added to `main_grad`.
        copies: messages are copies through symmetric memory.
        overrides: a subclass of Megatron's layer computes the experts.
        config: further fields of Megatron's configuration.
    """

    expert: int = 2
    tensor: int = 1
    expert_tensor: int = 1
    spec: str = "local"
    dtype: torch.dtype = torch.float32
    experts: int = 8
    topk: int = 2
    gated: bool = True
    main_grad: bool = False
    deterministic: bool = False
    copies: bool = False
    overrides: bool = False
    config: dict[str, Any] = field(default_factory=dict)


def start(_: dist.ProcessGroup, case: MoECase) -> None:
    """Megatron's groups for the layout of a case. Groups of the same layout stay: Megatron makes 30."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    wanted = case.tensor, case.expert, case.expert_tensor
    sizes = (
        parallel_state.get_tensor_model_parallel_world_size,
        parallel_state.get_expert_model_parallel_world_size,
        parallel_state.get_expert_tensor_parallel_world_size,
    )
    started = parallel_state.model_parallel_is_initialized()
    if started and tuple(size() for size in sizes) != wanted:
        parallel_state.destroy_model_parallel()
        started = False
    if not started:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tensor,
            expert_model_parallel_size=case.expert,
            expert_tensor_parallel_size=case.expert_tensor,
        )
    model_parallel_cuda_manual_seed(7)


def make_layer(case: MoECase) -> Any:
    """A layer whose parameters are the same on every call."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_config import TransformerConfig

    # The router of 0.16.1 reads the name, which its module lacks without TransformerEngine.
    vars(moe_utils).setdefault("te_general_gemm", None)
    settings: dict[str, Any] = {
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 0.01,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": case.spec == "grouped",
        "add_bias_linear": False,
        "bias_activation_fusion": False,
        "sequence_parallel": case.tensor > 1,
        **case.config,
    }
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=4,
        num_moe_experts=case.experts,
        moe_router_topk=case.topk,
        gated_linear_unit=case.gated,
        activation_func=F.silu if case.gated else F.gelu,
        tensor_model_parallel_size=case.tensor,
        expert_model_parallel_size=case.expert,
        expert_tensor_parallel_size=case.expert_tensor,
        use_cpu_initialization=True,
        params_dtype=case.dtype,
        bf16=case.dtype == torch.bfloat16,
        **settings,
    )
    if case.spec == "local":
        spec = gpt_layer_specs.get_gpt_layer_local_spec(num_experts=case.experts, moe_grouped_gemm=False)
    else:
        spec = gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            num_experts=case.experts, moe_grouped_gemm=case.spec == "grouped"
        )
    torch.manual_seed(11 + dist.get_rank())
    mlp = spec.submodules.mlp
    if callable(mlp) and not hasattr(mlp, "submodules"):
        layer = mlp(config, pg_collection=None)
    else:
        layer = MoELayer(config, mlp.submodules)
    layer.set_layer_number(1)
    if case.overrides:

        class OwnExperts(MoELayer):
            def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> Any:
                x, rows, probs = self.token_dispatcher.dispatch_postprocess(hidden_states, probs)
                y, bias = self.experts(x, rows, probs)
                return self.token_dispatcher.combine_preprocess(y), bias

        layer.__class__ = OwnExperts
    if case.main_grad:
        for module in layer.experts.modules():
            if hasattr(module, "gradient_accumulation_fusion"):
                module.gradient_accumulation_fusion = True
    return layer.train()


def step(layer: Any, case: MoECase, seed: int = 0) -> dict[str, Any]:
    """Output, input gradient and parameter gradients of one pass."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(ROWS, 2, HIDDEN, generator=generator).to(case.dtype).requires_grad_()
    dy = torch.randn(ROWS, 2, HIDDEN, generator=generator).to(case.dtype)
    for parameter in layer.parameters():
        parameter.grad = None
        if case.main_grad:
            parameter.main_grad = torch.zeros(parameter.shape)
            parameter.grad_added_to_main_grad = False
    y, _ = layer(x)
    y.backward(dy)
    found = {"y": y.detach(), "dx": x.grad}
    for name, parameter in layer.named_parameters():
        gradient = parameter.grad
        if case.main_grad and parameter.grad_added_to_main_grad:
            gradient = parameter.main_grad
        found[name] = gradient
    return found


def _session(case: MoECase, **overlap: Any) -> Any:
    settings = {"tensor": {"method": "none"}, "data": {"method": "none"}, "expert": {"method": "p2p"}}
    return enable(OverlapConfig.model_validate({**settings, "deterministic": case.deterministic, **overlap}))


def against_stock(group: dist.ProcessGroup, case: MoECase) -> dict[str, Any]:
    """The tensors that differ from the stock layer in two steps, the largest difference, and what was counted."""
    start(group, case)
    layer = make_layer(case)
    stock_case = case if not case.main_grad else MoECase(**{**vars(case), "main_grad": False})
    plain = make_layer(stock_case)
    with torch.no_grad():  # TransformerEngine draws the weights of grouped experts from a generator of its own
        for own, same in zip(plain.parameters(), layer.parameters(), strict=True):
            own.copy_(same)
    expected = [step(plain, stock_case, seed) for seed in (0, 1)]
    with _session(case) as session:
        if case.copies:
            experts = layer.token_dispatcher.ep_group
            copies = CopyTransport(CpuBackend(HostGroup(experts)))
            session.transports.insert(experts, copies, "copies")
        got = [step(layer, case, seed) for seed in (0, 1)]
        sites = session.report().sites
        if case.copies:
            assert {"expert_received", "expert_returned"} <= set(copies.buffer_pool.sizes())
        dist.barrier(group)
    differ, worst = [], 0.0
    for first, second in zip(expected, got, strict=True):
        for name, true in first.items():
            assert (true is None) == (second[name] is None), name
            if true is not None and not torch.equal(true, second[name].to(true.dtype)):
                differ.append(name)
                scale = true.abs().max().clamp_min(1e-30)
                worst = max(worst, ((true - second[name]).abs().max() / scale).item())
    return {
        "differ": sorted(set(differ)),
        "worst": worst,
        "calls": {f"{site.op} {site.direction}": tally.overlapped for site, tally in sites.items()},
        "fallbacks": [reason for tally in sites.values() for reason in tally.fallbacks],
    }


def fallback(group: dist.ProcessGroup, case: MoECase) -> list[str]:
    """The reasons of a layer that runs the stock path, after a step that equals it."""
    found = against_stock(group, case)
    assert found["differ"] == []
    assert not any(found["calls"].values()), found["calls"]
    return list(found["fallbacks"])


def reason_of(group: dist.ProcessGroup, changes: dict[str, Any]) -> str | None:
    """The reason after a change of a supported layer: `object.attribute` names, for what cannot run on a CPU."""
    from megatron_overlap.adapters.expert_parallel.experts import unsupported_layer_reason

    case = MoECase()
    start(group, case)
    layer = make_layer(case)
    assert unsupported_layer_reason(layer) is None
    for path, value in changes.items():
        *owners, name = path.split(".")
        owner = layer
        for each in owners:
            owner = getattr(owner, each)
        object.__setattr__(owner, name, value)
    return unsupported_layer_reason(layer)


def shared_expert_order(group: dist.ProcessGroup, case: MoECase) -> list[str]:
    """What a step computes, in order: the router and the shared experts, and the weight gradients of all experts."""
    start(group, case)
    layer, events = make_layer(case), list[str]()
    layer.router.register_forward_hook(lambda *_: events.append("router"))
    layer.shared_experts.register_forward_pre_hook(lambda *_: events.append("shared"))
    layer.shared_experts.linear_fc1.weight.register_hook(lambda _: events.append("shared wgrad"))
    next(layer.experts.parameters()).register_hook(lambda _: events.append("experts wgrad"))
    with _session(case):
        step(layer, case)
    return events


def changed_between_steps(group: dist.ProcessGroup) -> tuple[list[str], list[str], int]:
    """What changes after a step of a layer is seen in the next: reasons, tensors that differ, and overlapped steps."""
    from megatron_overlap.adapters.expert_parallel.layer import ExpertAdapter

    case = MoECase(config=SHARED)
    start(group, case)
    layer, plain = make_layer(case), make_layer(case)
    expert, changed = layer.experts.local_experts[0].linear_fc1, plain.experts.local_experts[0].linear_fc1
    with _session(case) as session:
        step(layer, case)
        handle = expert.register_forward_hook(lambda *_: None)
        hooked = step(layer, case)
        handle.remove()
        handle = expert.register_full_backward_hook(lambda *_: None)
        step(layer, case)
        handle.remove()
        handle = expert.register_forward_pre_hook(lambda *_: None, with_kwargs=True)
        step(layer, case)
        handle.remove()
        expert.forward = expert.forward
        step(layer, case)
        del expert.forward
        with torch.autocast("cpu", dtype=torch.bfloat16):
            session.adapter(ExpertAdapter).begins(layer, torch.empty(0, HIDDEN))
        expert.weight = torch.nn.Parameter(torch.randn(expert.weight.shape))
        got = step(layer, case, 1)
        sites = session.report().sites
    steps = [(step(plain, case), hooked)]
    changed.weight = torch.nn.Parameter(expert.weight.detach().clone())
    steps.append((step(plain, case, 1), got))
    differ = [
        name
        for expected, found in steps
        for name, true in expected.items()
        if true is not None and not torch.equal(true, found[name])
    ]
    counts = {(site.op, site.direction): tally for site, tally in sites.items()}
    forward = counts["expert_parallel", "forward"]
    return [f"{count} x {reason}" for reason, count in forward.fallbacks.items()], differ, forward.overlapped


def pre_hooks(group: dist.ProcessGroup) -> list[int]:
    """How often the pre-hooks of the modules of the experts run in one forward, and text of one that changes input."""
    case = MoECase()
    start(group, case)
    layer = make_layer(case)
    calls: list[str] = []
    for name, module in layer.experts.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    with _session(case):
        step(layer, case)
    return [calls.count(name) for name, _ in layer.experts.named_modules()]


def checkpointed_by_torch(group: dist.ProcessGroup) -> tuple[float, int, str]:
    """Steps of two calls in `torch.utils.checkpoint`: the largest difference from stock, overlapped forwards, and what
    the report excludes from autotuning."""
    case = MoECase()
    start(group, case)

    def run() -> list[torch.Tensor]:
        layer, results = make_layer(case), []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            leaves = [torch.randn(ROWS, 2, HIDDEN, generator=generator, requires_grad=True) for _ in range(2)]
            outputs = [checkpoint(layer, leaf, use_reentrant=False)[0] for leaf in leaves]
            (outputs[0] - outputs[1]).square().sum().backward()
            results += [leaf.grad for leaf in leaves if leaf.grad is not None]
        return results

    stock = run()
    with _session(case, expert={"method": "auto"}) as session:
        mine = run()
        report = session.report()
    worst = max(float((a - b).abs().max() / a.abs().max()) for a, b in zip(stock, mine, strict=True))
    overlapped = sum(tally.overlapped for site, tally in report.sites.items() if site.direction == "forward")
    return worst, overlapped, report.not_overlapped["autotuning"]


def disabled(group: dist.ProcessGroup) -> list[bool]:
    """Whether the three methods are replaced, in a session and after it."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    names = ("dispatch", "routed_experts_compute", "combine")
    original = [MoELayer.__dict__[name] for name in names]
    with _session(MoECase()):
        inside = [MoELayer.__dict__[name] is not old for name, old in zip(names, original, strict=True)]
    return inside + [MoELayer.__dict__[name] is old for name, old in zip(names, original, strict=True)]
