"""scripts/generate_gpt.py on two CPU ranks: the same tokens with and without the plugin; what it needs on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.patching.manifest import load_permits
from tests.adapters.megatron_runs import NO_GPU, PLUGIN_OFF, SCRIPTS, TINY, TP2_SP, start_ranks

WORKER = Path(__file__).parents[1] / "adapters" / "cpu" / "left_out_worker.py"
ARGS = [*NO_GPU, *TINY, "--position-embedding-type", "rope", "--generate-tokens", "5"]


def prompts(folder: Path) -> Path:
    file = folder / "prompts.txt"
    file.write_text("5 6 7 8 9\n10 11 12 13 14 15 16 17\n3 4\n")
    return file


@pytest.mark.long
def test_the_same_tokens_with_and_without_the_plugin(tmp_path: Path) -> None:
    overlap = tmp_path / "overlap.yaml"
    overlap.write_text("overlap: {strict: true, tensor: {method: p2p}}\n")
    results: list[dict[str, Any]] = []
    for name, env in (("stock", PLUGIN_OFF), ("plugin", None)):
        file = tmp_path / f"{name}.json"
        argv = [str(SCRIPTS / "generate_gpt.py"), *ARGS, *TP2_SP, "--generate-prompts", str(prompts(tmp_path))]
        argv += ["--generate-json", str(file), "--overlap-config", str(overlap), "--overlap-device", "cpu"]
        first, *_ = done = start_ranks(2, argv, env=env, timeout_s=300)
        assert [each.returncode for each in done] == [0, 0], first.stdout[-4000:]
        assert "engine dynamic, 3 prompts of 2 to 8 tokens" in first.stdout
        results.append(json.loads(file.read_text()))
    stock, mine = results
    assert [len(tokens) for tokens in stock["tokens"]] == [5, 5, 5]
    assert mine["tokens"] == stock["tokens"]
    assert len(mine["steps"]) == 5
    assert mine["first_token_ms"] == mine["steps"][0][1]
    assert mine["tokens_per_s"] > 0


@pytest.mark.long
def test_without_its_adaptation_the_dynamic_engine_ends_as_the_entry_says(tmp_path: Path) -> None:
    (permit,) = [each for each in load_permits() if each.name == "generation"]
    argv = ["generation", str(SCRIPTS / "generate_gpt.py"), *ARGS, "--generate-prompts", str(prompts(tmp_path))]
    (done,) = start_ranks(1, argv, timeout_s=300, program=[str(WORKER)])
    assert re.search(permit.without, done.stdout), done.stdout[-3000:]
