"""The configs that users copy are right, and a pair differs by the plugin alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.config import (
    ConfigError,
    LaunchConfig,
    arms,
    load_launch_config,
    to_megatron_args,
    without_overlap,
)
from megatron_overlap.config.resources import config_file

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(file for device in ("cpu", "gpu") for file in (CONFIGS / device).rglob("*.yaml"))


def short(file: Path) -> str:
    return str(file.relative_to(CONFIGS).with_suffix(""))


def pair(layout: str) -> tuple[LaunchConfig, LaunchConfig]:
    """The config with overlap and its baseline."""
    return load_launch_config(CONFIGS / layout / "overlap.yaml"), load_launch_config(CONFIGS / layout / "baseline.yaml")


@pytest.mark.parametrize("file", SHIPPED, ids=short)
def test_it_plans(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", short(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    cfg = load_launch_config(file)
    assert cfg.name == "_".join(short(file).split("/")[1:])
    assert cfg.launch.device == {"cpu": "cpu", "gpu": "cuda"}[short(file).split("/")[0]]
    assert all(argument in shown for argument in to_megatron_args(cfg))


@pytest.mark.parametrize("name", ["gpu/llama3_8b_tp8/overlap", "configs/gpu/llama3_8b_tp8/overlap.yaml"])
def test_a_shipped_config_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for spelled in (name, f"{name.removesuffix('.yaml')}.yaml", name.removesuffix(".yaml")):
        assert config_file(spelled) == CONFIGS / "gpu" / "llama3_8b_tp8" / "overlap.yaml"
    (tmp_path / "my.yaml").write_text(f"base: {name}\ntrain: {{lr: 0.5}}\n")
    own = load_launch_config("my.yaml")
    assert (own.name, own.train.lr, own.model.hidden_size) == ("my", 0.5, 4096)


@pytest.mark.parametrize(
    "name", ["llama3_8b_tp8_overlap", "gpu/llama3_8b_tp8/overlp.yaml", "configs/gpu/llama3_8b_tp8"]
)
def test_an_unknown_name_names_the_nearest(name: str) -> None:
    line = f"CONFIG: {name}: no such file or shipped config; give a YAML file, did you mean gpu/llama3_8b_tp8/overlap?"
    with pytest.raises(ConfigError, match=re.escape(line)):
        config_file(name)


PAIRS = {
    layout: "data"
    if "_dp2" in layout
    else "ulysses"
    if "_up8" in layout
    else "expert"
    if "_ep" in layout and "_tp" not in layout
    else "tensor"
    for layout in (short(file).removesuffix("/overlap") for file in SHIPPED if file.stem == "overlap")
    if "_up2" not in layout and "_varlen" not in layout
}


@pytest.mark.parametrize("layout", PAIRS)
def test_a_pair_differs_by_the_plugin_alone(layout: str) -> None:
    on, off = pair(layout)
    assert to_megatron_args(on) == to_megatron_args(off)
    assert on.model_copy(update={"name": "x", "overlap": off.overlap}) == off.model_copy(update={"name": "x"})
    assert getattr(on.overlap, PAIRS[layout]).method in ("auto", "p2p")
    assert off.overlap.tensor.method == "none"
    # The baseline keeps Megatron's data parallel overlap.
    assert off.overlap.data.method == "stock"


def test_ulysses_is_compared_with_itself_exposed() -> None:
    on, off = pair("cpu/llama_up2")
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap.ulysses == without_overlap(on).overlap.ulysses
    assert off.overlap.ulysses.schedule == "serial"


def test_documents_are_compared_with_every_one_of_them_cut() -> None:
    on, off = pair("cpu/llama_cp2_varlen")
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap == without_overlap(on).overlap.model_copy(update={"data": on.overlap.data})
    on, off = pair("gpu/llama3_8b_cp8_varlen")
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap == without_overlap(on).overlap
    on, alone = (load_launch_config(CONFIGS / f"cpu/llama_cp2_varlen/{kind}.yaml") for kind in ("overlap", "one_rank"))
    assert (alone.world_size, alone.overlap.varlen.method) == (1, "masked")
    assert (alone.model, alone.train, alone.data) == (on.model, on.train, on.data)


# What the names promise: GPUs, and layers times width as published.
GPUS = {
    "gpt3_1.3b_tp8": (8, 24, 2048),
    "gpt3_13b_tp8": (8, 40, 5120),
    "gpt3_175b_tp8_pp8": (64, 96, 12288),
    "gpt3_175b_tp8_pp16": (256, 96, 12288),
    "llama2_70b_tp8_pp4": (64, 80, 8192),
    "llama3_8b_tp8": (8, 32, 4096),
    "llama3_8b_tp8_dp8": (64, 32, 4096),
    "llama3_8b_up8": (8, 32, 4096),
    "llama3_8b_cp8_varlen": (8, 32, 4096),
    "llama3_70b_tp4_pp8": (64, 80, 8192),
    "llama3_405b_tp8_pp9": (576, 126, 16384),
    "mixtral_8x7b_tp4_ep8": (64, 32, 4096),
    "qwen3_30b_a3b_ep16": (16, 48, 2048),
    "deepseek_v3_like_pp10_ep64": (640, 60, 7168),
}


@pytest.mark.parametrize("layout", GPUS)
def test_a_config_is_what_its_name_says_and_states_its_source(layout: str) -> None:
    file = CONFIGS / "gpu" / layout / "overlap.yaml"
    cfg = load_launch_config(file)
    assert (cfg.world_size, cfg.model.num_layers, cfg.model.hidden_size) == GPUS[layout]
    assert f"{cfg.world_size} GPUs" in file.read_text() or "one node of eight GPUs" in file.read_text()
    assert "arXiv" in file.read_text()
    assert cfg.ranks_per_node == 8
    for part in layout.split("_"):
        for short, size in (("tp", cfg.parallel.tensor), ("pp", cfg.parallel.pipeline), ("dp", cfg.data_parallel_size)):
            if part.startswith(short):
                assert part == f"{short}{size}"


def test_every_config_for_gpus_is_in_the_list() -> None:
    on_gpus = {short(file) for file in SHIPPED if file.is_relative_to(CONFIGS / "gpu")}
    pairs = {f"gpu/{layout}/{kind}" for layout in GPUS for kind in ("overlap", "baseline")}
    userbuffers = {f"gpu/{layout}/userbuffers" for layout in GPUS if "_tp" in layout}
    assert on_gpus == pairs | userbuffers | {"gpu/qwen3_30b_a3b_ep16/1f1b"}


@pytest.mark.parametrize("layout", [layout for layout in GPUS if "_tp" in layout])
def test_userbuffers_are_the_baseline_with_one_flag(layout: str) -> None:
    on, off = pair(f"gpu/{layout}")
    userbuffers = load_launch_config(CONFIGS / "gpu" / layout / "userbuffers.yaml")
    assert [arg for arg in to_megatron_args(userbuffers) if arg != "--tp-comm-overlap"] == to_megatron_args(off)
    assert userbuffers.train.tp_comm_overlap
    assert userbuffers.overlap == off.overlap
    made = arms(on)
    assert [arm.model_copy(update={"name": "x"}) for arm in made] == [
        arm.model_copy(update={"name": "x"}) for arm in (without_overlap(on), on, userbuffers)
    ]
    assert [arm.name for arm in made] == [f"{on.name}_baseline", on.name, f"{on.name}_userbuffers"]


def test_experts_are_compared_with_two_micro_batches_overlapped() -> None:
    """Megatron's overlap needs one pipeline stage, or several chunks of each, and no full recomputation."""
    on, off = pair("gpu/qwen3_30b_a3b_ep16")
    own = load_launch_config(CONFIGS / "gpu/qwen3_30b_a3b_ep16/1f1b.yaml")
    assert to_megatron_args(own) == [*to_megatron_args(off), "--overlap-moe-expert-parallel-comm"]
    assert arms(on) == (without_overlap(on), on, own.model_copy(update={"name": f"{on.name}_1f1b"}))
    for layout in ("gpu/deepseek_v3_like_pp10_ep64", "cpu/mixtral_ep2"):
        assert len(arms(pair(layout)[0])) == 2


def test_there_are_pairs_and_a_quickstart() -> None:
    assert {"cpu/quickstart", "cpu/llama_tp2/netlab"} <= {short(file) for file in SHIPPED}
    quickstart = load_launch_config(CONFIGS / "cpu" / "quickstart.yaml")
    assert quickstart.launch.hosts is not None
    assert quickstart.launch.hosts.fallback == "loopback"
    assert (quickstart.data.kind, quickstart.data.path) == ("text", "data/stdlib")
