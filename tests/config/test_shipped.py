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


PAIRS = {"gpt_tp2": "tensor", "llama_tp2": "tensor", "llama3_8b_tp8": "tensor", "gpt_dp2": "data"}


@pytest.mark.parametrize("stem", PAIRS)
def test_a_pair_differs_by_the_plugin_alone(stem: str) -> None:
    on, off = (load_launch_config(CONFIGS / f"{stem}_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert on.model_copy(update={"name": "x", "overlap": off.overlap}) == off.model_copy(update={"name": "x"})
    assert getattr(on.overlap, PAIRS[stem]).method in ("auto", "p2p")
    assert off.overlap.tensor.method == "none"
    # Megatron's own overlap stays: it is what the plugin is compared with.
    assert off.overlap.data.method == "megatron"


def test_ulysses_is_compared_with_itself_exposed() -> None:
    on, off = (load_launch_config(CONFIGS / f"llama_up2_{kind}.yaml") for kind in ("overlap", "baseline"))
    assert to_megatron_args(on) == to_megatron_args(off)
    assert off.overlap.ulysses == without_overlap(on).overlap.ulysses
    assert off.overlap.ulysses.schedule == "serial"


def test_there_are_pairs_and_a_quickstart() -> None:
    assert {"quickstart", "llama_tp2_netlab"} <= {file.stem for file in SHIPPED}
    quickstart = load_launch_config(CONFIGS / "quickstart.yaml")
    assert quickstart.launch.hosts is not None
    assert quickstart.launch.hosts.fallback == "loopback"
    assert (quickstart.data.kind, quickstart.data.path) == ("text", "data/stdlib")
