"""Megatron trains without a GPU, and its results do not depend on the parallel layout."""

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.adapters.megatron_runs import (
    PLUGIN_OFF,
    SCRIPTS,
    TP2_SP,
    assert_equal_training,
    start_ranks,
    train,
)

GPT = SCRIPTS / "pretrain_gpt.py"
LLAMA = SCRIPTS / "pretrain_llama.py"
GQA = ("--group-query-attention", "--num-query-groups", "2")

Rows = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    return train(tmp_path_factory.mktemp("one"), GPT, 1)


@pytest.mark.long
def test_tensor_and_sequence_parallel_resume_from_a_checkpoint(one_rank: Rows, tmp_path: Path) -> None:
    layout = (*TP2_SP, "--use-distributed-optimizer", "--save-interval", "2")
    rows = train(tmp_path / "first", GPT, 2, *layout, "--save", str(tmp_path / "saved"))
    assert sorted(rows) == [1, 2, 3, 4]
    assert_equal_training(rows, one_rank)

    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "second", GPT, 2, *layout, "--load", str(tmp_path / "saved"))
    assert sorted(resumed) == [3, 4]
    assert_equal_training(resumed, one_rank)

    meta = json.loads((tmp_path / "first" / "meta-rank1.json").read_text())
    assert meta["tensor_parallel"] == 2
    assert meta["dtype"] == "fp32"
    assert meta["device"] == "cpu"
    assert rows[1]["peak_memory_bytes"] > 50e6
    assert (tmp_path / "first" / "report-rank1.json").is_file()


@pytest.mark.long
def test_llama_is_the_same_in_both_layouts(tmp_path: Path) -> None:
    assert_equal_training(train(tmp_path / "two", LLAMA, 2, *GQA, *TP2_SP), train(tmp_path / "one", LLAMA, 1, *GQA))


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch\n"
        "torch.distributed.init_process_group('nccl')\n"
        "if os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('rank one fails')\n"
        "torch.distributed.all_reduce(torch.ones(4, device='cuda'))\n"
    )
    first, second = start_ranks(2, [str(script), "--overlap-device", "cpu"], env=PLUGIN_OFF, timeout_s=60)
    assert first.returncode == 1
    assert second.returncode == 1
    assert "rank one fails" in second.stdout


def test_the_exit_code_of_a_script_is_the_exit_code_of_the_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nsys.exit(beside.CODE)\n")
    (tmp_path / "beside.py").write_text("CODE = 7\n")
    (done,) = start_ranks(1, [str(script), "--overlap-device", "cpu"], env=PLUGIN_OFF, timeout_s=60)
    assert done.returncode == 7, done.stdout


def test_the_child_processes_of_a_failed_script_are_killed(tmp_path: Path) -> None:
    """Megatron's checkpoint writers, for example, wait for work without a timeout."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, sys, time\n"
        "child = multiprocessing.Process(target=time.sleep, args=(600,))\n"
        "child.start()\n"
        "print('child', child.pid, flush=True)\n"
        "sys.exit(3)\n"
    )
    (done,) = start_ranks(1, [str(script), "--overlap-device", "cpu"], env=PLUGIN_OFF, timeout_s=60)
    assert done.returncode == 3, done.stdout
    pid = int(done.stdout.split("child ")[1].split()[0])
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(pid)
