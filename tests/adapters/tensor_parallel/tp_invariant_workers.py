"""Worker functions of test_tp_invariant.py: the logits of a Megatron model on one tensor-parallel group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from scripts.bench.gpt import build_gpt
from tests.adapters.tensor_parallel.linear_workers import start

VOCABULARY, SEQUENCE, BATCH = 64, 64, 2


def logits(
    group: dist.ProcessGroup, dtype: torch.dtype, sp: bool, overlap: dict[str, Any] | None
) -> dict[str, torch.Tensor]:
    """The logits of a training and of a forward-only pass, of the whole vocabulary; `overlap` None runs stock."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    start(group)
    model = build_gpt(
        ranks=group.size(),
        sp=sp and group.size() > 1,
        dtype=dtype,
        vocabulary=VOCABULARY,
        max_tokens=SEQUENCE,
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        init_method_std=0.3,
    )
    for number, (name, parameter) in enumerate(model.named_parameters()):
        if name.endswith("bias"):
            shards = group.size() if getattr(parameter, "tensor_model_parallel", False) else 1
            whole = torch.randn(shards * len(parameter), generator=torch.Generator().manual_seed(number))
            parameter.data.copy_(whole.chunk(shards)[group.rank() % shards])
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(5))
    positions = torch.arange(SEQUENCE).expand_as(ids)

    def run() -> dict[str, torch.Tensor]:
        found = {}
        for name, training in (("training", True), ("forward only", False)):
            with torch.set_grad_enabled(training):
                y = model.train(training)(ids, positions, None)
            if training:
                y.float().square().mean().backward()
            found[name] = gather_from_tensor_model_parallel_region(y).detach()
        return found

    if overlap is None:
        return run()
    with enable(OverlapConfig.model_validate(overlap), strict=True) as session:
        found = run()
        if group.size() > 1:
            assert all(tally.overlapped for site, tally in session.report().sites.items() if site.op != "copy_gemm")
        return found


def reasons(group: dist.ProcessGroup, sequence: int, te: bool) -> tuple[set[str], int]:
    """The reasons of the fallbacks of a forward pass with sequence parallelism, and the number of overlapped calls."""
    start(group)
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    model = build_gpt(
        ranks=group.size(), sp=True, dtype=torch.float32, vocabulary=VOCABULARY, max_tokens=SEQUENCE, te=te, **sizes
    )
    ids = torch.zeros(BATCH, sequence, dtype=torch.long)
    overlap = {"tensor": {"method": "p2p"}, "deterministic": "tp_invariant"}
    with enable(OverlapConfig.model_validate(overlap)) as session, torch.no_grad():
        model(ids, torch.arange(sequence).expand_as(ids), None)
        tallies = session.report().sites.values()
        return {reason for each in tallies for reason in each.fallbacks}, sum(each.overlapped for each in tallies)


def gradients_of_vocabulary(group: dist.ProcessGroup, vocabulary: int) -> set[str]:
    """The reasons of the fallbacks of forward and backward, whose gradients are compared with those of stock."""
    start(group)
    sizes = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 4}
    model = build_gpt(ranks=1, sp=False, dtype=torch.float32, vocabulary=vocabulary, max_tokens=SEQUENCE, **sizes)
    ids = torch.zeros(BATCH, SEQUENCE, dtype=torch.long)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(ids, torch.arange(SEQUENCE).expand_as(ids), None).square().mean().backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients()
    with enable(
        OverlapConfig.model_validate({"tensor": {"method": "p2p"}, "deterministic": "tp_invariant"})
    ) as session:
        found = gradients()
        reasons = {reason for each in session.report().sites.values() for reason in each.fallbacks}
    torch.testing.assert_close(found, expected)
    return reasons
