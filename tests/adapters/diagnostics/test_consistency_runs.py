"""Whole runs: ranks with different configs train no step, and a deterministic run is reproducible to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.adapters.megatron_runs import NO_GPU, SCRIPTS, TINY, TP2_SP, start_ranks, train

GPT = SCRIPTS / "pretrain_gpt.py"
DETERMINISTIC = {"overlap": {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "deterministic": True}}


def write(path: Path, content: object) -> str:
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_rank_with_another_config_stops_all_before_the_first_step(tmp_path: Path) -> None:
    config = write(tmp_path / "overlap.yaml", DETERMINISTIC)
    wrapper = tmp_path / "pretrain.py"
    wrapper.write_text(
        "import os, runpy, megatron_overlap.session as session\n"
        "if os.environ['RANK'] == '1':\n"
        "    current = session.current()\n"
        "    current.config = current.config.model_copy(update={'timeout_s': 77.0})\n"
        f"runpy.run_path({str(GPT)!r}, run_name='__main__')\n"
    )
    run = tmp_path / "run"
    argv = [str(wrapper), *NO_GPU, *TINY, *TP2_SP, "--overlap-device", "cpu", "--overlap-run-dir", str(run)]
    for done in start_ranks(2, [*argv, "--overlap-config", config]):
        assert done.returncode == 2, done.stdout[-3000:]
        line = next(line for line in done.stdout.splitlines() if line.startswith("the ranks differ"))
        assert "overlap.timeout_s: None on rank 0, 77.0 on rank 1" in line
        assert "Traceback" not in done.stdout
    assert (run / "steps-rank0.jsonl").read_text() == ""


@pytest.mark.long
def test_a_deterministic_run_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    flags = (*TP2_SP, "--bf16", "--overlap-config", write(tmp_path / "overlap.yaml", DETERMINISTIC))
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    first = train(tmp_path / "first", GPT, 2, *flags, *save, off=False)
    second = train(tmp_path / "second", GPT, 2, *flags, off=False)
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "resumed", GPT, 2, *flags, "--load", str(tmp_path / "saved"), off=False)
    assert sorted(resumed) == [3, 4]
    for name in ("loss", "grad_norm"):
        assert [first[step][name] for step in first] == [second[step][name] for step in first]
        assert [first[step][name] for step in resumed] == [resumed[step][name] for step in resumed]
