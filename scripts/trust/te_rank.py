"""One rank of `scripts/te_releases.py`: a model of TransformerEngine layers, stock and with the plugin."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

TENSOR = {"method": "p2p", "chunks_per_rank": 2}


def main() -> None:
    from megatron_overlap.adapters import cpu

    cpu.install(te_layers=True)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()

    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megatron_overlap import OverlapConfig, enable

    parallel_state.initialize_model_parallel(size)
    model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=96,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=size,
        sequence_parallel=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
    )
    tokens = torch.randint(0, 128, (2, 32), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(32).expand(2, -1)
    state: dict[str, Any] | None = None

    def run() -> tuple[float, dict[str, torch.Tensor]]:
        """Loss and gradients of a model with the weights of the first one."""
        nonlocal state
        layers = get_gpt_layer_with_transformer_engine_spec()
        model = GPTModel(config, layers, vocab_size=128, max_sequence_length=32, position_embedding_type="rope")
        if state is None:
            state = model.state_dict()
        model.load_state_dict(state)
        loss = model(tokens, positions, None, labels=tokens).mean()
        loss.backward()
        return loss.item(), {name: value.grad for name, value in model.named_parameters() if value.grad is not None}

    stock, expected = run()
    with enable(OverlapConfig.model_validate({"tensor": TENSOR})) as session:
        loss, grads = run()
        report = session.report().as_dict()
    deviation = max(float((grads[name] - grad).norm() / grad.norm()) for name, grad in expected.items())
    if rank == 0:
        result = {
            "loss": abs(loss - stock) / abs(stock),
            "gradients": deviation,
            "overlapped": report["totals"]["overlapped"],
            "fallbacks": sorted({reason for module in report["modules"] for reason in module["fallbacks"]}),
        }
        with open(sys.argv[1], "w") as file:
            json.dump(result, file)
    assert grads.keys() == expected.keys()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
