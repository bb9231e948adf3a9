"""The launches of a comparison: completed, checked, and in alternating order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.config import ConfigError, LaunchConfig, OverlapConfig, load_launch_config
from megatron_overlap.config.resources import config_file
from megatron_overlap.session import Session
from megatron_overlap.tools.compare import command, rounds
from megatron_overlap.tools.compare.comparison import Launched
from megatron_overlap.tools.compare.rounds import read_training, run_rounds, select, select_generation
from megatron_overlap.tools.launch.processes import RunError
from megatron_overlap.tools.launch.run_records import RunRecordError
from tests.tools.compare.test_comparison import LINK, record


def config(name: str = "b", method: str = "p2p", **train: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(
        {
            "name": name,
            "model": {"preset": "gpt_tiny"},
            "parallel": {"tensor": 2, "sequence_parallel": True},
            "train": {"seq_length": 64, "global_batch_size": 1, "iterations": 5, **train},
            "overlap": {"tensor": {"method": method}},
            "launch": {"device": "cpu"},
        }
    )


def test_one_config_is_compared_with_itself_without_overlap() -> None:
    chosen = select([("b.yaml", config())], attribute=False)
    assert [entry.name for entry in chosen.configs] == ["b_baseline", "b"]
    assert [entry.overlap.tensor.method for entry in chosen.configs] == ["none", "p2p"]
    assert not chosen.serial


def test_a_config_for_gpus_is_also_compared_with_userbuffers() -> None:
    on_gpus = load_launch_config(config_file("gpu/llama3_8b_tp8/overlap"))
    chosen = select([("b.yaml", on_gpus)], attribute=True).configs
    kinds = ["_baseline", "", "_userbuffers", "_serial"]
    assert [entry.name for entry in chosen] == [f"llama3_8b_tp8_overlap{kind}" for kind in kinds]
    assert [entry.train.tp_comm_overlap for entry in chosen] == [False, False, True, False]
    assert [entry.overlap.tensor.method for entry in chosen] == ["none", "auto", "none", "p2p"]


def test_attribution_adds_the_same_messages_without_overlap() -> None:
    chosen = select([("b.yaml", config(method="auto"))], attribute=True)
    assert chosen.serial
    serial = chosen.configs[2]
    assert (serial.name, serial.overlap.tensor.method, serial.overlap.tensor.schedule) == ("b_serial", "p2p", "serial")
    assert serial.train == chosen.configs[1].train


def with_experts(ranks: int, method: str = "none") -> LaunchConfig:
    """Experts over so many ranks, without tensor parallelism."""
    dump = config(method=method).model_dump()
    dump["parallel"].update(tensor=1, sequence_parallel=False)
    dump["overlap"]["expert"]["method"] = "auto"
    dump["megatron_args"] = ["--num-experts", "8", "--expert-model-parallel-size", str(ranks)]
    return LaunchConfig.model_validate(dump)


def test_attribution_of_experts_has_serial_experts() -> None:
    serial = select([("b.yaml", with_experts(2))], attribute=True).configs[-1]
    assert (serial.overlap.expert.method, serial.overlap.expert.schedule) == ("p2p", "serial")
    assert serial.overlap.tensor.schedule == "auto"


def test_checkpoints_are_not_saved_and_a_note_reports_it() -> None:
    chosen = select([("b.yaml", config(save="checkpoints", save_interval=5))], attribute=False)
    assert all(entry.train.save is None and entry.train.save_interval is None for entry in chosen.configs)
    assert "train.save" in chosen.notes[0]


@pytest.mark.parametrize(
    ("given", "attribute", "message"),
    [
        ([config(method="none")], False, "f0.yaml: overlap.tensor.method: none: the config has no overlap"),
        ([config(iterations=2)], False, "f0.yaml: train.iterations: 2: must be at least 3"),
        ([config("a"), config("b", seed=7)], False, "f1.yaml: train.seed: 7: must be 1234 as in f0.yaml"),
        ([config("a"), config("b", seq_length=128)], False, "f1.yaml: train.seq_length: 128: must be 64"),
        ([config("a", precision="fp32"), config("b")], False, "f1.yaml: train.precision: bf16: must be fp32"),
        ([config("a"), config("a")], False, "name: a: two configs have this name"),
        ([config("a"), config("b", method="none")], True, "f1.yaml: overlap.tensor.method: none: compare --attribute"),
        ([with_experts(1, "p2p")], True, "f0.yaml: overlap.tensor.method: p2p: compare --attribute needs"),
    ],
)
def test_configs_that_are_not_comparable_are_refused(given: list[LaunchConfig], attribute: bool, message: str) -> None:
    files = [(f"f{index}.yaml", entry) for index, entry in enumerate(given)]
    with pytest.raises(ConfigError) as caught:
        select(files, attribute=attribute)
    assert message in str(caught.value)


@pytest.mark.parametrize("number", [1, 2])
def test_configs_for_several_nodes_are_refused(number: int) -> None:
    several = load_launch_config(config_file("gpu/llama3_70b_tp4_pp8/overlap"))
    message = "b.yaml: launch.nodes: 8: compare starts ranks on this node only; use launch --emit-slurm"
    given = [("b.yaml", several), ("c.yaml", several)][:number]
    with pytest.raises(ConfigError, match=message):
        select(given, attribute=False)
    with pytest.raises(ConfigError, match=message):
        select_generation(given, prompt_tokens=None, batches=(1,), new_tokens=1, engine="dynamic")


def test_notes_name_what_only_some_runs_have() -> None:
    other = config("c", global_batch_size=2).model_dump()
    other["megatron_args"] = ["--optimizer", "sgd"]
    other["launch"]["ranks_per_node"] = 4
    given = [("b.yaml", config(global_batch_size=2)), ("c.yaml", LaunchConfig.model_validate(other))]
    assert select(given, attribute=False).notes == (
        "c has 4 ranks, b 2.",
        "Only some runs have these megatron_args: --optimizer sgd.",
    )
    assert select([("b.yaml", config())], attribute=False).notes == ()


def test_attribution_of_ulysses_beside_tensor_parallelism_has_serial_messages() -> None:
    both = config().model_dump()
    both["parallel"]["context"], both["overlap"]["ulysses"]["method"] = 2, "p2p"
    serial = select([("b.yaml", LaunchConfig.model_validate(both))], attribute=True).configs[-1]
    assert (serial.overlap.tensor.schedule, serial.overlap.ulysses.schedule) == ("serial", "serial")


def test_a_launch_of_few_steps_has_no_times(tmp_path: Path) -> None:
    """As one that resumes near its end."""
    report = Session(OverlapConfig()).report()
    for rank in range(2):
        row = {"iteration": 5, "step_time_ms": 1.0, "loss": 1.0, "grad_norm": 1.0, "peak_memory_bytes": 1}
        (tmp_path / f"steps-rank{rank}.jsonl").write_text(json.dumps(row) + "\n")
        (tmp_path / f"report-rank{rank}.json").write_text(json.dumps(report.as_dict()))
    (tmp_path / "meta-rank0.json").write_text("{}")
    with pytest.raises(RunRecordError, match="it has 1 steps; the first 2 of every launch are not timed"):
        read_training(tmp_path, config())


def test_configs_with_different_models_are_refused() -> None:
    other = config("b").model_dump()
    other["model"]["num_layers"] = 3
    with pytest.raises(ConfigError, match=r"model\.num_layers: 3: must be 2"):
        select([("a", config("a")), ("b", LaunchConfig.model_validate(other))], attribute=False)


def test_every_second_round_is_reversed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "execute", lambda launched, **_: None)
    monkeypatch.setattr(rounds, "_link_of", lambda launched: {})
    order: list[str] = []
    configs = [config("a"), config("b"), config("c")]
    sides = run_rounds(configs, 3, tmp_path, read=lambda folder, _: folder.name, on_launch=order.append)
    assert [text.split()[-1] for text in order] == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert [side.records for side in sides] == [tuple(f"round{i}-{name}" for i in (1, 2, 3)) for name in "abc"]


def test_times_count_although_the_peak_rate_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise RunError("not done after 120 s")

    chosen = select([("b.yaml", config())], attribute=False)
    launched = [Launched(each.name, LINK, (record([1, 1, 30]),)) for each in chosen.configs]
    monkeypatch.setattr(command, "_launch", lambda *_: (tmp_path, launched, []))
    monkeypatch.setattr(command.flops, "find_peak", fails)
    command._compare_training(chosen, 1, None)
    for run in json.loads((tmp_path / "compare.json").read_text())["runs"]:
        assert (run["step_time_ms"]["median"], run["mfu"]) == (30.0, None)
    assert "compare: b: the peak rate is unknown: not done after 120 s" in capsys.readouterr().err
