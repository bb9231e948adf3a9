"""Megatron's own parser and checks take the arguments, and mean by them what the config says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.config import ConfigError, load_launch_config, to_megatron_args
from megatron_overlap.config.megatron_args import (
    CPU_SWITCHES,
    CPU_VALUES,
    DERIVED,
    SWITCHES,
    UNEVEN_STAGES,
    VALUES,
    value_at,
)
from tests.adapters.megatron_runs import start_ranks
from tests.config.samples import write
from tests.config.test_shipped import SHIPPED, short

# Megatron parses and validates each list of arguments in argv[1].
ASK = """
import argparse, enum, json, os, sys
request = json.loads(sys.argv[1])
os.environ.update(CUDA_DEVICE_MAX_CONNECTIONS="1", RANK="0")
from megatron_overlap.adapters.cpu import install
install()
from megatron.training import arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
arguments.add_megatron_arguments(parser)
arguments.add_megatron_arguments = lambda new: parser  # parse_args makes one in 0.15 s each time
known = sorted(flag for action in parser._actions for flag in action.option_strings)
answers = []
for world, args in request:
    os.environ["WORLD_SIZE"] = str(world)
    sys.argv = ["script", *args]
    found = arguments.parse_args()
    arguments.validate_args(found, {})
    plain = (str, int, float, bool, type(None), list)
    answers.append({k: v if isinstance(v, plain) else str(v) for k, v in vars(found).items()})
print(json.dumps({"known": known, "answers": answers}, default=str))
"""

CASES: dict[str, list[str]] = {
    "llama": [],
    "gpt": ["model.preset=gpt_tiny"],
    "fp32": ["train.precision=fp32", "train.clip_grad=0", "train.lr=1e-05", "train.lr_warmup_iterations=2"],
    "data parallel": ["launch.ranks_per_node=4", "train.distributed_optimizer=true"],
    "data alone": ["launch.ranks_per_node=4", "overlap.data.method=none"],
    "pipeline": ["parallel.pipeline=2"],
    "uneven stages": [
        "model.num_layers=3",
        "parallel.pipeline=2",
        "megatron_args=[--decoder-first-pipeline-num-layers=1]",
    ],
    "recompute": ["train.recompute=full"],
    "selective": ["train.recompute=selective", "train.lr_decay_style=constant"],
    "checkpoints": ["train.save=ckpt", "train.load=ckpt", "train.save_interval=2", "train.lr_decay_iterations=10"],
    "text": ["data={kind: text, path: data/x/}", "train.eval_iterations=1"],
    "indexed": ["data={kind: indexed, path: x/y.bin, split: '90,10', workers: 3}"],
    "shape": ["model.kv_channels=16", "model.add_qkv_bias=true", "model.rotary_base=500000", "model.add_bias=false"],
    "free": ["megatron_args=[--use-cpu-initialization, --exit-interval, 3]"],
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What Megatron understood, for every case, and the flags it knows."""
    file = write(tmp_path_factory.mktemp("args"))
    configs = {name: load_launch_config(file, overrides) for name, overrides in CASES.items()}
    configs |= {str(shipped): load_launch_config(shipped) for shipped in SHIPPED}
    request = [(cfg.world_size, to_megatron_args(cfg)) for cfg in configs.values()]
    (done,) = start_ranks(1, [json.dumps(request)], program=("-c", ASK), timeout_s=280)
    assert done.returncode == 0, done.stdout
    answer = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"known"')))
    return {"known": set(answer["known"]), **dict(zip(configs, answer["answers"], strict=True))}


EXPECTED: dict[str, dict[str, Any]] = {
    "llama": {
        "num_layers": 2, "hidden_size": 256, "ffn_hidden_size": 688, "num_query_groups": 4, "kv_channels": 32,
        "group_query_attention": True, "swiglu": True, "normalization": "RMSNorm", "position_embedding_type": "rope",
        "add_bias_linear": False, "untie_embeddings_and_output_weights": True, "vocab_size": 4000, "bf16": True,
        "tensor_model_parallel_size": 2, "sequence_parallel": True, "train_iters": 5, "lr_decay_iters": 5,
        "transformer_impl": "local", "distributed_backend": "gloo", "gradient_accumulation_fusion": False,
        "mock_data": True, "num_workers": 0, "split": "100,0,0", "tokenizer_type": "NullTokenizer", "eval_iters": 0,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "log_interval": 1, "rotary_base": 10000,
        "overlap_grad_reduce": False,
    },
    "gpt": {
        "group_query_attention": False, "swiglu": False, "normalization": "LayerNorm", "add_bias_linear": True,
        "position_embedding_type": "learned_absolute", "untie_embeddings_and_output_weights": False,
        "ffn_hidden_size": 1024,
    },
    "fp32": {"bf16": False, "fp16": False, "clip_grad": 0.0, "lr": 1e-5, "lr_warmup_iters": 2},
    "data parallel": {
        "data_parallel_size": 2, "use_distributed_optimizer": True, "overlap_grad_reduce": True,
        "overlap_param_gather": True,
    },
    "data alone": {"data_parallel_size": 2, "overlap_grad_reduce": False},
    "pipeline": {"pipeline_model_parallel_size": 2, "data_parallel_size": 1},
    "uneven stages": {"num_layers": 3, "decoder_first_pipeline_num_layers": 1},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "selective": {"recompute_granularity": "selective", "lr_decay_style": "constant"},
    "checkpoints": {"save": "ckpt", "load": "ckpt", "save_interval": 2, "lr_decay_iters": 10},
    "text": {"data_path": ["data/x/tokens"], "mock_data": False, "split": "969,30,1", "eval_iters": 1},
    "indexed": {"data_path": ["x/y"], "split": "90,10", "num_workers": 3},
    "shape": {"kv_channels": 16, "add_qkv_bias": True, "rotary_base": 500000},
    "free": {"use_cpu_initialization": True, "exit_interval": 3},
}  # fmt: skip


@pytest.mark.parametrize("case", EXPECTED)
def test_megatron_understands(answers: dict[str, Any], case: str) -> None:
    found = answers[case]
    assert {key: found[key] for key in EXPECTED[case]} == EXPECTED[case]


@pytest.mark.parametrize("file", SHIPPED, ids=short)
def test_megatron_accepts_what_is_shipped(answers: dict[str, Any], file: Path) -> None:
    """Its parser and its own checks have run on the arguments; the parallel sizes are those of the config."""
    cfg, found = load_launch_config(file), answers[str(file)]
    layout = ("world_size", "tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
    sizes = (cfg.world_size, cfg.parallel.tensor, cfg.parallel.pipeline, cfg.data_parallel_size)
    assert tuple(found[key] for key in layout) == sizes
    counts = {"mixtral": 8, "qwen3": 128, "deepseek": 256}
    assert found["num_experts"] == next((count for name, count in counts.items() if name in str(file)), None)


def test_every_flag_in_the_tables_is_one_of_megatron(answers: dict[str, Any]) -> None:
    own = {flag for flag in DERIVED if flag.startswith("--overlap-") and not flag.endswith(("-reduce", "-gather"))}
    assert {*VALUES, *SWITCHES, *DERIVED, *CPU_SWITCHES, *CPU_VALUES, *UNEVEN_STAGES} - own <= answers["known"]


def test_cuda_leaves_the_kernels_to_megatron(tmp_path: Path) -> None:
    args = to_megatron_args(load_launch_config(write(tmp_path), ["launch.device=cuda"]))
    for flag in (*CPU_SWITCHES, "--distributed-backend", "--no-gradient-accumulation-fusion"):
        assert flag not in args
    assert args[args.index("--attention-backend") + 1] == "auto"
    assert args[args.index("--num-workers") + 1] == "2"
    off = load_launch_config(write(tmp_path), ["launch.device=cuda", "train.gradient_accumulation_fusion=false"])
    assert "--no-gradient-accumulation-fusion" in to_megatron_args(off)


def test_no_flag_is_given_twice(tmp_path: Path) -> None:
    for overrides in CASES.values():
        args = to_megatron_args(load_launch_config(write(tmp_path), overrides))
        flags = [arg for arg in args if arg.startswith("--")]
        assert len(flags) == len(set(flags))


def test_a_checkpoint_is_written_at_the_end_when_no_interval_is_given(tmp_path: Path) -> None:
    args = to_megatron_args(load_launch_config(write(tmp_path), ["train.save=ckpt"]))
    assert args[args.index("--save-interval") + 1] == "5"


def test_a_tokenizer_of_ones_own(tmp_path: Path) -> None:
    own = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "folder"]
    args = to_megatron_args(load_launch_config(write(tmp_path), [f"megatron_args={own}"]))
    assert args[-4:] == own
    assert "NullTokenizer" not in args


@pytest.mark.parametrize("flag", sorted({*VALUES, *SWITCHES, *DERIVED, *CPU_VALUES}))
def test_a_flag_of_a_key_is_refused(tmp_path: Path, flag: str) -> None:
    with pytest.raises(ConfigError, match=f"megatron_args.0: {flag}=3: .*sets this flag"):
        load_launch_config(write(tmp_path), [f"megatron_args=['{flag}=3']"])


def test_every_key_in_the_tables_exists(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path))
    for key in [*VALUES.values(), *(key for key, _ in SWITCHES.values()), *DERIVED.values()]:
        value_at(cfg, key)
