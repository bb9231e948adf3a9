"""Megatron's mixture-of-experts layer with the plugin equals the stock layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.adapters.expert_parallel import workers
from tests.adapters.expert_parallel.workers import SHARED, MoECase
from tests.helpers.gemm_rounding import bound
from tests.helpers.te import needs_te
from tests.helpers.world import World, assert_same

RANKS = 4


@pytest.fixture(scope="module")
def moe_ranks() -> Iterator[World]:
    """Workers of their own, whose Megatron groups change from test to test."""
    processes = World(answer_s=120, adapted=True)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def te_moe_ranks() -> Iterator[World]:
    """The same with TransformerEngine."""
    processes = World(answer_s=120, te=True)
    yield processes
    processes.close()


def check(world: World, case: MoECase) -> None:
    for found in world.run(RANKS, workers.against_stock, case):
        assert found["differ"] == [] or found["worst"] <= bound(), found
        calls = {"expert_parallel forward": 2, "expert_parallel dgrad": 2, "expert_parallel wgrad": 2}
        if case.config.get("recompute_granularity") == "selective":
            calls["expert_parallel forward"] = 4
        assert found["calls"] == calls
        assert found["fallbacks"] == []


CASES = {
    "EP2": MoECase(),
    "EP4": MoECase(expert=4),
    "EP4, one expert a rank": MoECase(expert=4, experts=4),
    "EP2, TP2 and SP": MoECase(tensor=2),
    "top-1": MoECase(topk=1, config={"moe_router_pre_softmax": True}),
    "not gated": MoECase(gated=False),
    "dropping": MoECase(config={"moe_expert_capacity_factor": 1.0}),
    "shared": MoECase(config=SHARED),
    "shared, TP2 and SP": MoECase(tensor=2, config=SHARED),
    "shared, gate": MoECase(config={**SHARED, "moe_shared_expert_gate": True}),
    "recompute": MoECase(config={**SHARED, "recompute_granularity": "selective", "recompute_modules": ["moe"]}),
    "deterministic": MoECase(deterministic=True),
    "fused activation": MoECase(config={"bias_activation_fusion": True}),
    "main_grad": MoECase(main_grad=True, config=SHARED),
    "bf16": MoECase(dtype=torch.bfloat16),
    "bf16, EP4": MoECase(dtype=torch.bfloat16, expert=4, experts=16),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_stock_layer(moe_ranks: World, name: str) -> None:
    check(moe_ranks, CASES[name])


# Each call has another routing.
OF_COPIES = {
    "EP4, shared, recompute": MoECase(
        expert=4, config={**SHARED, "recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
    "EP4, one expert a rank": MoECase(expert=4, experts=4),
    "bf16, EP2, dropping": MoECase(dtype=torch.bfloat16, config={"moe_expert_capacity_factor": 1.0}),
}


@pytest.mark.parametrize("name", OF_COPIES)
def test_equals_the_stock_layer_over_copies(moe_ranks: World, name: str) -> None:
    check(moe_ranks, replace(OF_COPIES[name], copies=True))


# The daily run has each case with one of the two.
OF_TE = {
    "EP2": "grouped",
    "EP4": "te",
    "EP2, TP2 and SP": "grouped",
    "dropping": "te",
    "bf16": "grouped",
    "shared": "te",
    "fused activation": "grouped",
}


@needs_te
@pytest.mark.parametrize(
    ("name", "spec"),
    [
        pytest.param(name, spec, id=f"{name}-{spec}", marks=[] if spec == daily else [pytest.mark.long])
        for name, daily in OF_TE.items()
        for spec in ("te", "grouped")
    ],
)
def test_equals_the_stock_layer_of_transformer_engine(te_moe_ranks: World, name: str, spec: str) -> None:
    check(te_moe_ranks, replace(CASES[name], spec=spec))


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        (MoECase(config={"moe_token_dispatcher_type": "allgather"}), "token dispatcher allgather: use"),
        (
            MoECase(config={"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}),
            "--moe-pad-expert-input-to-capacity: every expert gets padding rows",
        ),
        (
            MoECase(config={"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": True}),
            "--moe-shared-expert-overlap: remove it",
        ),
        (MoECase(config={"add_bias_linear": True}), "the experts have biases: add --disable-bias-linear"),
        (MoECase(overrides=True), "OwnExperts overrides routed_experts_compute"),
        (
            MoECase(topk=1, config={"moe_router_pre_softmax": True, "moe_apply_probs_on_input": True}),
            "--moe-apply-probs-on-input: probabilities scale",
        ),
    ],
    ids=lambda value: value.split(":")[0] if isinstance(value, str) else "",
)
def test_falls_back_with_a_reason(moe_ranks: World, case: MoECase, reason: str) -> None:
    found = moe_ranks.run(RANKS, workers.fallback, case)
    assert_same(found)
    assert len(found[0]) == 1
    assert found[0][0].startswith(reason)


@pytest.mark.parametrize(
    ("change", "value", "reason"),
    [
        ("token_dispatcher.tp_size", 2, "--expert-tensor-parallel-size 2: use 1"),
        ("token_dispatcher.ep_size", 65, "more than 64 expert-parallel ranks"),
        ("config.moe_latent_size", 32, "--moe-latent-size"),
        ("config.fp8", "hybrid", "--fp8-format"),
        ("config.fp4", "e2m1", "--fp4-format"),
        ("config.overlap_moe_expert_parallel_comm", True, "--overlap-moe-expert-parallel-comm"),
        ("config.overlap_dispatch_backward_with_experts_wgrad", True, "--overlap-dispatch-backward-with-experts-wgrad"),
        ("config.delay_wgrad_compute", True, "--delay-wgrad-compute"),
        ("config.cuda_graph_impl", "transformer_engine", "--cuda-graph-impl transformer_engine"),
        ("config.fine_grained_activation_offloading", True, "activations are offloaded to the CPU"),
        ("config.cpu_offloading", True, "activations are offloaded to the CPU"),
    ],
)
def test_reasons_of_what_needs_a_gpu(moe_ranks: World, change: str, value: object, reason: str) -> None:
    """The attribute alone is set: these features do not run on a CPU."""
    found = moe_ranks.run(RANKS, workers.reason_of, {change: value})
    assert_same(found)
    assert found[0].startswith(reason)


def test_changes_between_steps_are_seen(moe_ranks: World) -> None:
    """Hooks, a replaced forward, autocast and replaced weights; what cannot change is decided once."""
    for reasons, differ, overlapped in moe_ranks.run(RANKS, workers.changed_between_steps):
        hook = "4 x a hook reads the output of an expert, or its forward is replaced"
        assert reasons == [hook, "1 x autocast is on"]
        assert differ == []
        assert overlapped == 2


def test_shared_experts_overlap_dispatch(moe_ranks: World) -> None:
    """Stock computes them before the router, and their gradients after those of the other experts."""
    expected = ["router", "shared", "shared wgrad", "experts wgrad"]
    assert moe_ranks.run(RANKS, workers.shared_expert_order, MoECase(config=SHARED)) == [expected] * RANKS


def test_pre_hooks_of_the_experts_run(moe_ranks: World) -> None:
    """Megatron waits for gathered parameters there."""
    for counts in moe_ranks.run(RANKS, workers.pre_hooks):
        assert set(counts) == {1}


def test_calls_that_torch_recomputes_run_by_one_method(moe_ranks: World) -> None:
    for worst, overlapped, excluded in moe_ranks.run(RANKS, workers.checkpointed_by_torch):
        assert worst < 1e-5
        assert excluded.startswith("unmeasured p2p runs: torch.utils.checkpoint recomputes the layer")
        assert overlapped == 4 * 2 * 2, "forward and recomputation"


def test_methods_are_restored(moe_ranks: World) -> None:
    assert moe_ranks.run(RANKS, workers.disabled) == [[True] * 6] * RANKS
