"""Builds models of launch configs as a machine with GPUs builds them; `test_gpu_models.py` runs it in a process.

The argument checks, the specifications and the layer classes are those of Megatron and TransformerEngine (TE), and the
ranks are as many as the config has. The process groups are torch's fake ones, the widths are small, and one layer per
pipeline stage is built, without the plugin. The CPU adaptation is applied without the patch that permits norms which a
GPU machine refuses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from types import ModuleType
from typing import Any

import torch.distributed as dist

from megatron_overlap.adapters import cpu
from megatron_overlap.config import load_launch_config, to_megatron_args
from megatron_overlap.config.resources import transformer_engine_folder
from megatron_overlap.patching.manifest import load_permits

HEAD_SIZE = 16
NORM_PATCH = "megatron.core.transformer.torch_norm:WrappedTorchNorm.__new__"


def main() -> None:
    """Reads pairs of a config and overrides; prints the classes of each model, or the error."""
    request = json.loads(sys.argv[1])
    sys.path.append(str(transformer_engine_folder()))
    # Apex's extension, which the containers of NVIDIA have; Megatron imports it and calls it in backward only.
    sys.modules["fused_weight_gradient_mlp_cuda"] = ModuleType("fused_weight_gradient_mlp_cuda")
    permits = [permit for permit in load_permits() if NORM_PATCH in permit.targets]
    assert len(permits) == 1
    cpu.adapt(permits)
    from megatron.training import arguments

    # `parse_args` makes a parser in 0.15 s for each config.
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    arguments.add_megatron_arguments = lambda new: parser

    answers: list[Any] = []
    for file, overrides in request:
        try:
            answers.append(build(file, overrides))
        except Exception as error:
            answers.append(f"{type(error).__name__}: {error}")
    print(json.dumps(answers))


def build(file: str, overrides: list[str]) -> dict[str, str]:
    """Name and class of every module of the last pipeline stage of a config."""
    import transformer_engine.pytorch.module.base as te_base
    from megatron.core import mpu
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training import arguments, global_vars
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from scripts.pretrain_decoder import build_model

    cfg = load_launch_config(file, overrides)
    os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", RANK="0", WORLD_SIZE=str(cfg.world_size))
    sys.argv = ["script", *to_megatron_args(cfg)]
    args = arguments.parse_args()
    arguments.validate_args(args, {})
    args.num_layers, args.kv_channels = cfg.parallel.pipeline, HEAD_SIZE
    args.hidden_size = HEAD_SIZE * args.num_attention_heads
    args.ffn_hidden_size = 16 * cfg.parallel.tensor
    if args.num_experts:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    args.padded_vocab_size, args.max_position_embeddings = 128 * cfg.parallel.tensor, args.seq_length
    global_vars.set_args(args)
    te_base._ub_initialized = args.tp_comm_overlap  # Megatron creates the communicators, which need a GPU, before
    last = cfg.world_size - 1
    dist.init_process_group("fake", rank=last, world_size=cfg.world_size, store=FakeStore())
    try:
        mpu.initialize_model_parallel(
            cfg.parallel.tensor,
            cfg.parallel.pipeline,
            context_parallel_size=cfg.parallel.context,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(args.seed)
        model = build_model(pre_process=cfg.parallel.pipeline == 1)
        return {name: type(module).__name__ for name, module in model.named_modules()}
    finally:
        mpu.destroy_model_parallel()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
