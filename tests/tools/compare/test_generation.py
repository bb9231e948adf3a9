"""`megatron-overlap compare --generate`: times and tokens of stock and overlapped generation."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_overlap import cli
from megatron_overlap.config import ConfigError, LaunchConfig
from megatron_overlap.tools.compare import generation_report
from megatron_overlap.tools.compare.comparison import Launched
from megatron_overlap.tools.compare.generation import (
    METRICS,
    GenerationComparison,
    GenerationRecord,
    Measured,
    Workload,
    compare_generation,
    first_difference,
    read_generation,
)
from megatron_overlap.tools.compare.report import measured_on
from megatron_overlap.tools.compare.rounds import select_generation
from megatron_overlap.tools.launch.run_records import RunRecordError
from tests.helpers.forked_python import ForkedPython
from tests.tools.compare.samples import LINK, META
from tests.tools.compare.test_command import write_config
from tests.tools.compare.test_rounds import config

SHORT, LONG = Workload(128, 1), Workload(512, 4)
SIZES: dict[str, Any] = {"prompt_tokens": (8, 24), "batches": (1, 2), "new_tokens": 5, "engine": "dynamic"}


def record(first: float, decode: float, rate: float, *tokens: tuple[int, ...]) -> GenerationRecord:
    """A launch whose long workload takes twice as long as its short one."""
    figures = [dict(zip(METRICS, (scale * first, scale * decode, rate / scale), strict=True)) for scale in (1, 2)]
    workloads = {SHORT: Measured(figures[0], ((1, 2),)), LONG: Measured(figures[1], tokens)}
    return GenerationRecord("dynamic", workloads, META, None)


def comparison(*tokens: tuple[int, ...]) -> GenerationComparison:
    """Two rounds: the second run has its first token 1.5 and 2 times sooner."""
    same = ((5, 6, 7), (8, 9, 9))
    stock = Launched("base", LINK, (record(30, 4, 100, *same), record(40, 4, 100, *same)))
    mine = Launched("mine", LINK, (record(20, 5, 150, *same), record(20, 5, 150, *tokens)))
    return compare_generation([stock, mine], {"notes": ["Rounds: 2."]})


def test_ratios_are_of_the_same_round_and_above_1_where_the_run_is_faster() -> None:
    reference, mine = comparison((5, 6, 7), (8, 9, 9)).runs
    for place, scale in ((0, 1), (1, 2)):
        summary = mine.workloads[place]
        assert reference.workloads[place].speedups == {}
        assert summary.figures["first_token_ms"].median == 20 * scale
        assert summary.speedups["first_token_ms"].median == pytest.approx(1.75)
        assert summary.speedups["decode_ms"].median == pytest.approx(0.8)
        assert summary.speedups["tokens_per_s"].median == pytest.approx(1.5)
    assert mine.tokens_equal
    assert (mine.workloads[1].equal_sequences, mine.workloads[1].sequences) == (4, 4)


def test_other_tokens_are_counted_and_their_first_place_is_named() -> None:
    result = comparison((5, 6, 7), (8, 1, 9))
    summary = result.runs[1].workloads[1]
    assert (summary.equal_sequences, summary.sequences, summary.first_difference) == (3, 4, 1)
    assert not result.runs[1].tokens_equal
    assert generation_report.headline(result).endswith("at 512 tokens, batch 4; tokens differ")
    cells = [row.cells for row in generation_report.rows(result) if row.label.startswith("equal sequences: 512")]
    assert cells == [("reference", "3 of 4; first difference at token 2")]


@pytest.mark.parametrize(
    ("a", "b", "place"), [((1, 2), (1, 2), None), ((1, 2), (1, 3), 1), ((1,), (1, 3), 1), ((), (), None)]
)
def test_the_first_difference(a: tuple[int, ...], b: tuple[int, ...], place: int | None) -> None:
    assert first_difference(a, b) == first_difference(b, a) == place


def test_every_run_launches_the_generation_script_with_the_same_workloads() -> None:
    chosen = select_generation([("b.yaml", config(save="checkpoints", save_interval=5))], **SIZES)
    assert [each.name for each in chosen.configs] == ["b_baseline", "b"]
    assert [each.overlap.tensor.method for each in chosen.configs] == ["none", "p2p"]
    for each in chosen.configs:
        assert str(each.launch.entry).endswith("generate_gpt.py")
        assert each.megatron_args[:5] == ("--generate-workloads", "8x1", "8x2", "24x1", "24x2")
        assert each.train.save is None


def changed(**sections: Any) -> LaunchConfig:
    content = config().model_dump()
    for section, keys in sections.items():
        content[section].update(keys)
    return LaunchConfig.model_validate(content)


def test_default_prompts_leave_positions_for_new_tokens() -> None:
    short = changed(model={"max_position_embeddings": 64}, train={"seq_length": 64})
    sizes = {**SIZES, "prompt_tokens": None, "new_tokens": 8}
    chosen = select_generation([("f.yaml", short)], **sizes).configs[0]
    assert chosen.megatron_args[:5] == ("--generate-workloads", "14x1", "14x2", "56x1", "56x2")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"parallel": {"pipeline": 2}}, "f.yaml: parallel.pipeline: 2: must be 1 with compare --generate"),
        ({"model": {"max_position_embeddings": 64}, "train": {"seq_length": 64}}, "prompt and new tokens need 1005"),
    ],
)
def test_a_config_that_cannot_generate_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_generation([("f.yaml", changed(**sections))], **{**SIZES, "prompt_tokens": (1000,)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--generate", "--attribute"], "compare --attribute"),
        (["--generate", "--engine", "fast"], "give dynamic or static"),
        (["--generate", "--batches", "1,x"], "give whole numbers of 1 or more"),
    ],
)
def test_wrong_requests_are_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["compare", str(write_config(tmp_path)), *argv]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


def test_a_launch_without_a_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunRecordError, match=r"generation\.json"):
        read_generation(tmp_path, config())
    (tmp_path / "generation.json").write_text('{"meta": {}}')
    with pytest.raises(RunRecordError, match="'workloads': the key is missing"):
        read_generation(tmp_path, config())


def test_two_ranks_generate_the_tokens_of_stock(forked_python: ForkedPython, tmp_path: Path) -> None:
    argv = [str(write_config(tmp_path)), "--generate", "--rounds", "1", "--output", str(tmp_path / "out")]
    argv += ["--prompt-tokens", "24", "--batches", "1,2", "--new-tokens", "3"]
    done = subprocess.run([*forked_python.cli, "compare", *argv], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    reference, mine = written["runs"]
    assert (reference["name"], mine["name"]) == ("tiny_baseline", "tiny")
    assert (reference["plugin"]["active"], mine["plugin"]["active"]) == (False, True)
    assert mine["plugin"]["overlapped_calls"] > 0
    assert mine["plugin"]["fallbacks"] == []
    assert mine["tokens_equal"]
    shapes = [(each["prompt_tokens"], each["batch"]) for each in mine["workloads"]]
    assert shapes == [(24, 1), (24, 2)]
    for each in (*reference["workloads"], *mine["workloads"]):
        assert each["sequences"] == each["equal_sequences"] == each["batch"]
        assert all(each["figures"][name]["median"] > 0 for name in METRICS)
    rows = json.loads((tmp_path / "out" / "runs" / "round1-tiny" / "generation.json").read_text())["workloads"]
    assert all(len(tokens) == 3 for row in rows for tokens in row["tokens"])
    assert len({tuple(tokens) for row in rows for tokens in row["tokens"]}) > 1
    settings = yaml.safe_load((tmp_path / "out" / "runs" / "round1-tiny" / "config.yaml").read_text())
    assert settings["launch"]["entry"].endswith("generate_gpt.py")
    page = (tmp_path / "out" / "compare.html").read_text()
    for text in ("tiny: first token ", "first token, ms: 24 tokens, batch 2", "tokens equal"):
        assert text in page or text in done.stdout
    assert "<h2>Fallbacks" in page
    assert (tmp_path / "out" / "compare.png").stat().st_size > 20_000


def test_runs_on_different_networks_are_named_with_their_network() -> None:
    same = ((5, 6, 7), (8, 9, 9))
    sides = [Launched(name, {"description": name * 2}, (record(30, 4, 100, *same),)) for name in ("a", "b")]
    assert "The networks differ: a: aa; b: bb." in measured_on(compare_generation(sides, {"notes": []}))
