"""The configs that users copy are right, and a pair differs by the plugin alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.config import load_launch_config, to_megatron_args, without_overlap

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_it_plans(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    cfg = load_launch_config(file)
    assert cfg.name == file.stem
    assert all(argument in shown for argument in to_megatron_args(cfg))


PAIRS = {
    stem: "data" if "_dp2" in stem else "tensor"
    for stem in (file.stem.removesuffix("_overlap") for file in SHIPPED if file.stem.endswith("_overlap"))
    if "_up" not in stem and "_varlen" not in stem
}


@pytest.mark.parametrize("stem", PAIRS)
def test_a_pair_differs_by_the_plugin_alone(stem: str) -> None:
    on, off = (load_launch_config(CONFIGS / f"{stem}_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert on.model_copy(update={"name": "x", "overlap": off.overlap}) == off.model_copy(update={"name": "x"})
    assert getattr(on.overlap, PAIRS[stem]).method in ("auto", "p2p")
    assert off.overlap.tensor.method == "none"
    # Megatron's own overlap stays: it is what the plugin is compared with.
    assert off.overlap.data.method == "stock"


@pytest.mark.parametrize("stem", ["llama_up2", "llama3_8b_up8"])
def test_ulysses_is_compared_with_itself_exposed(stem: str) -> None:
    on, off = (load_launch_config(CONFIGS / f"{stem}_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap.ulysses == without_overlap(on).overlap.ulysses
    assert off.overlap.ulysses.schedule == "serial"


def test_documents_are_compared_with_every_one_of_them_cut() -> None:
    on, off = (load_launch_config(CONFIGS / f"llama_cp2_varlen_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap == without_overlap(on).overlap.model_copy(update={"data": on.overlap.data})
    on, off = (load_launch_config(CONFIGS / f"llama3_8b_cp8_varlen_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap == without_overlap(on).overlap
    on = load_launch_config(CONFIGS / "llama_cp2_varlen_overlap.yaml")
    alone = load_launch_config(CONFIGS / "llama_varlen_one_rank.yaml")
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
}


@pytest.mark.parametrize("stem", GPUS)
def test_a_config_is_what_its_name_says_and_states_its_source(stem: str) -> None:
    file = CONFIGS / f"{stem}_overlap.yaml"
    cfg = load_launch_config(file)
    assert (cfg.world_size, cfg.model.num_layers, cfg.model.hidden_size) == GPUS[stem]
    assert f"{cfg.world_size} GPUs" in file.read_text() or "one node of eight GPUs" in file.read_text()
    assert "arXiv" in file.read_text()
    assert cfg.ranks_per_node == 8
    for part in stem.split("_"):
        for short, size in (("tp", cfg.parallel.tensor), ("pp", cfg.parallel.pipeline), ("dp", cfg.data_parallel_size)):
            if part.startswith(short):
                assert part == f"{short}{size}"


def test_every_config_for_gpus_is_in_the_list() -> None:
    on_gpus = {file.stem for file in SHIPPED if load_launch_config(file).launch.device == "cuda"}
    assert on_gpus == {f"{stem}_{kind}" for stem in GPUS for kind in ("overlap", "baseline")}


def test_there_are_pairs_and_a_quickstart() -> None:
    assert {"quickstart", "llama_tp2_netlab"} <= {file.stem for file in SHIPPED}
    quickstart = load_launch_config(CONFIGS / "quickstart.yaml")
    assert quickstart.launch.hosts is not None
    assert quickstart.launch.hosts.fallback == "loopback"
    assert (quickstart.data.kind, quickstart.data.path) == ("text", "data/stdlib")
