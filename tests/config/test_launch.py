"""Models by name, what is derived from what, and the JSON Schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from megatron_overlap import cli
from megatron_overlap.config import ModelConfig, load_launch_config
from megatron_overlap.config.launch import PRESETS
from tests.config.samples import write


def num_parameters(model: ModelConfig) -> int:
    """Counted from the layers' shapes, with the vocabulary not padded."""
    hidden, head = model.hidden_size, model.head_size
    qkv = head * (model.num_attention_heads + 2 * model.num_query_groups)
    matrices = hidden * qkv + head * model.num_attention_heads * hidden
    matrices += (3 if model.swiglu else 2) * hidden * model.ffn_hidden_size
    norm = hidden * (1 if model.normalization == "RMSNorm" else 2)
    biases = qkv + 2 * hidden + model.ffn_hidden_size if model.add_bias else 0
    embeddings = model.vocab_size * hidden * (2 if model.untie_embeddings else 1)
    positions = 0 if model.rotary else model.max_position_embeddings * hidden
    return model.num_layers * (matrices + 2 * norm + biases) + norm + embeddings + positions


# Published totals: the models' own cards and papers; GPT-3's table is rounded.
PUBLISHED = {
    "gpt3_125m": (125e6, 0.01),
    "gpt3_350m": (350e6, 0.03),
    "gpt3_760m": (760e6, 0.01),
    "gpt3_1.3b": (1.3e9, 0.03),
    "gpt3_2.7b": (2.65e9, 0.01),
    "gpt3_6.7b": (6.65e9, 0.01),
    "gpt3_13b": (12.85e9, 0.01),
    "gpt3_175b": (174.6e9, 0.001),
    "llama2_7b": (6_738_415_616, 0),
    "llama2_13b": (13_015_864_320, 0),
    "llama2_70b": (68_976_648_192, 0),
    "llama3_8b": (8_030_261_248, 0),
    "llama3_70b": (70_553_706_496, 0),
    "llama3_405b": (405_853_388_800, 0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_size(name: str) -> None:
    total, tolerance = PUBLISHED[name]
    assert num_parameters(ModelConfig.model_validate({"preset": name})) == pytest.approx(total, rel=tolerance, abs=0)


def test_mixtral_has_the_published_size() -> None:
    """The preset is the model with one of its eight experts, and has no router."""
    model = ModelConfig.model_validate({"preset": "mixtral_8x7b"})
    expert, router = 3 * model.hidden_size * model.ffn_hidden_size, 8 * model.hidden_size
    assert num_parameters(model) + model.num_layers * (7 * expert + router) == 46_702_792_704


def test_qwen3_has_the_published_size() -> None:
    """The preset is the model with one of its 128 experts, and has neither a router nor norms of queries and keys."""
    model = ModelConfig.model_validate({"preset": "qwen3_30b_a3b"})
    expert, router, norms = 3 * model.hidden_size * model.ffn_hidden_size, 128 * model.hidden_size, 2 * 128
    assert num_parameters(model) + model.num_layers * (127 * expert + router + norms) == 30_532_122_624


def test_every_preset_is_tested() -> None:
    assert set(PRESETS) == {*PUBLISHED, "gpt_tiny", "llama_tiny", "mixtral_8x7b", "qwen3_30b_a3b"}


@pytest.mark.parametrize("tensor", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_a_tiny_vocabulary_pads_alike_in_all_releases(name: str, tensor: int) -> None:
    size = ModelConfig.model_validate({"preset": name}).vocab_size
    padded = {-(-(size + extra) // (128 * tensor)) * 128 * tensor for extra in (0, 1)}
    assert padded == {4096}


def test_keys_beside_a_preset_win() -> None:
    model = ModelConfig.model_validate({"preset": "llama3_8b", "num_layers": 2, "swiglu": False})
    assert (model.num_layers, model.swiglu, model.hidden_size) == (2, False, 4096)


SHAPE: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 768, "num_attention_heads": 12, "vocab_size": 100, "max_position_embeddings": 64
}  # fmt: skip


def test_an_architecture_fills_in_its_family() -> None:
    gpt = ModelConfig.model_validate({"arch": "gpt", **SHAPE})
    llama = ModelConfig.model_validate({"arch": "llama", **SHAPE})
    assert (gpt.normalization, gpt.swiglu, gpt.rotary, gpt.add_bias) == ("LayerNorm", False, False, True)
    assert (llama.normalization, llama.swiglu, llama.rotary, llama.add_bias) == ("RMSNorm", True, True, False)
    assert (gpt.untie_embeddings, llama.untie_embeddings) == (False, True)
    assert (gpt.ffn_hidden_size, llama.ffn_hidden_size) == (3072, 2048)
    assert (gpt.num_query_groups, gpt.head_size) == (12, 64)


def test_query_groups_may_be_fewer_than_ranks(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path), ["model.num_query_groups=1"])
    assert (cfg.parallel.tensor, cfg.model.num_query_groups) == (2, 1)


def test_sections_are_frozen(tmp_path: Path) -> None:
    cfg = load_launch_config(write(tmp_path))
    with pytest.raises(ValidationError):
        cfg.train.lr = 3.0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("overrides", "world", "per_node", "copies", "micro_batches"),
    [
        ([], 2, 2, 1, 4),
        (["launch.ranks_per_node=4"], 4, 4, 2, 2),
        (["launch.hosts={hosts: 2, gbps: 1}"], 2, 1, 1, 4),
        (["launch.hosts={hosts: 2, ranks_per_host: 2, gbps: 1}"], 4, 2, 2, 2),
        (["launch.device=cuda", "launch.nodes=2", "launch.ranks_per_node=4"], 8, 4, 4, 1),
        (["launch.device=cuda", "launch.nodes=2", "parallel.tensor=4"], 4, 2, 1, 4),
        (["train.micro_batch_size=2"], 2, 2, 1, 2),
    ],
)
def test_ranks(
    tmp_path: Path, overrides: list[str], world: int, per_node: int, copies: int, micro_batches: int
) -> None:
    cfg = load_launch_config(write(tmp_path), overrides)
    found = (cfg.world_size, cfg.ranks_per_node, cfg.data_parallel_size, cfg.num_microbatches)
    assert found == (world, per_node, copies, micro_batches)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert {"base", "name", "model", "train", "overlap", "megatron_args"} <= set(schema["properties"])
    assert schema["additionalProperties"] is False
    assert schema["anyOf"] == [{"required": ["base"]}, {"required": ["model", "train"]}]
    tensor = schema["$defs"]["TensorOverlap"]["properties"]
    assert tensor["method"]["enum"] == ["auto", "p2p", "fused", "none"]
    assert "description" in tensor["chunks_per_rank"]
    assert "required" not in schema["$defs"]["ModelConfig"], "a preset fills in what a file leaves out"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "megatron-overlap 0.2.0\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    for name, (_, short) in cli.COMMANDS.items():
        assert name in shown
        assert short in shown


def test_null_is_as_good_as_left_out(tmp_path: Path) -> None:
    assert load_launch_config(write(tmp_path), ["model.ffn_hidden_size=null"]).model.ffn_hidden_size == 688
    assert load_launch_config(write(tmp_path), ["model.norm_epsilon=null"]).model.norm_epsilon == 1e-5
