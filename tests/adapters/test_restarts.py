"""Interrupted runs that continue from a checkpoint: by Megatron's signal handler and by torchrun."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import yaml

from tests.adapters.megatron_runs import (
    NO_GPU,
    PLUGIN_OFF,
    ROOT,
    SCRIPTS,
    TINY,
    TP2_SP,
    assert_equal_training,
    rows,
    start_ranks,
    train,
)

GPT = SCRIPTS / "pretrain_gpt.py"
AT_STEP = """
import os, runpy, signal, threading, time
def watch():
    while {wanted}:
        try:
            lines = open({steps!r}).read().count("\\n")
        except OSError:
            lines = 0
        if lines >= {at}:
            os.kill(os.getpid(), signal.{number})
            return
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
runpy.run_path({script!r}, run_name="__main__")
"""
TWICE = """
import runpy
from megatron.core.rerun_state_machine import RerunMode
# Megatron 0.19.2 does not know by this name what its command line calls so.
RerunMode._value2member_map_["report_stats"] = RerunMode.REPORT_DETERMINISM_STATS
runpy.run_path({script!r}, run_name="__main__")
"""
MORE = ("--train-iters", "30")


def config(folder: Path) -> str:
    path = folder / "overlap.yaml"
    overlap = {"tensor": {"method": "p2p", "chunks_per_rank": 2}, "timeout_s": 20.0, "strict": True}
    path.write_text(yaml.safe_dump({"overlap": overlap}))
    return str(path)


def end_marked(mark: dict[str, str]) -> None:
    """Ends every process that has these variables in its environment."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if mark.items() <= process.environ().items():
                process.kill()


@pytest.mark.long
def test_a_signal_saves_a_checkpoint_and_the_next_run_continues(tmp_path: Path) -> None:
    """`--exit-signal-handler`: SIGTERM on one rank ends all after the step they are in, with a checkpoint."""
    stock = train(tmp_path / "stock", GPT, 2, *TP2_SP, *MORE)
    run, saved = tmp_path / "run", tmp_path / "saved"
    wrapper = tmp_path / "pretrain.py"
    steps = str(run / "steps-rank0.jsonl")
    wanted = "os.environ['RANK'] == '1'"
    wrapper.write_text(AT_STEP.format(wanted=wanted, steps=steps, at=5, number="SIGTERM", script=str(GPT)))
    flags = (
        *TP2_SP,
        *MORE,
        "--save",
        str(saved),
        "--save-interval",
        "1000",
        "--exit-signal-handler",
        "--overlap-config",
        config(tmp_path),
    )
    argv = [str(wrapper), *NO_GPU, *TINY, *flags, "--overlap-device", "cpu", "--overlap-run-dir", str(run)]
    for done in start_ranks(2, argv):
        assert done.returncode == 0, done.stdout[-3000:]
    last = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert max(rows(run)) == last
    assert 5 <= last < 30
    resumed = train(tmp_path / "again", GPT, 2, *flags, "--load", str(saved), off=False)
    assert sorted(resumed) == list(range(last + 1, 31))
    assert_equal_training(resumed, stock)


def reruns(tmp_path: Path, name: str, *flags: str, off: bool) -> list[int]:
    """Exit codes of a run that Megatron's rerun state machine ends."""
    argv = [str(GPT), *NO_GPU, *TINY, *TP2_SP, *flags, "--save", str(tmp_path / f"{name}-saved")]
    argv += ["--save-interval", "1000", "--overlap-config", config(tmp_path), "--overlap-device", "cpu"]
    argv += ["--overlap-run-dir", str(tmp_path / name)]
    return [done.returncode for done in start_ranks(2, argv, env=PLUGIN_OFF if off else None)]


@pytest.mark.long
def test_every_step_run_twice(tmp_path: Path) -> None:
    """Megatron's determinism mode: each step's forward and backward is undone and run again."""
    buckets = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
    flags = (*TP2_SP, *shlex.split(buckets))
    again = ("--rerun-mode", "report_stats")
    path = tmp_path / "overlap.yaml"
    overlap = {"tensor": {"method": "p2p"}, "data": {"method": "p2p"}, "deterministic": True, "strict": True}
    path.write_text(yaml.safe_dump({"overlap": overlap}))
    plugin = ("--overlap-config", str(path))
    stock = train(tmp_path / "stock", GPT, 4, *flags)
    once = train(tmp_path / "once", GPT, 4, *flags, *plugin, off=False)
    wrapper = tmp_path / "pretrain.py"
    wrapper.write_text(TWICE.format(script=str(GPT)))
    twice = train(tmp_path / "twice", wrapper, 4, *flags, *again, *plugin, off=False)
    assert_equal_training(twice, stock)
    for iteration, row in once.items():
        for key in ("loss", "grad_norm"):
            assert twice[iteration][key] == row[key], f"iteration {iteration}, {key}"
    calls = {}
    for run in ("once", "twice"):
        report = json.loads((tmp_path / run / "report-rank0.json").read_text())
        columns = [module for module in report["modules"] if module["kind"] == "column"]
        calls[run] = {(m["name"], m["op"], m["direction"]): m["overlapped"] for m in columns}
    assert calls["once"]
    assert calls["twice"] == {site: 2 * number for site, number in calls["once"].items()}


@pytest.mark.long
@pytest.mark.parametrize(("kind", "code"), [("correct_result", 16), ("transient_error", 17)])
def test_an_injected_error_ends_as_in_stock(tmp_path: Path, kind: str, code: int) -> None:
    """Megatron runs the step again, and exits with a code for the kind of error."""
    flags = ("--error-injection-rate", "1", "--error-injection-type", kind)
    assert reruns(tmp_path, "stock", *flags, off=True) == [code] * 2
    assert reruns(tmp_path, "mine", *flags, off=False) == [code] * 2
    saved = [(tmp_path / f"{run}-saved" / "latest_checkpointed_iteration.txt") for run in ("stock", "mine")]
    texts = [path.read_text() if path.is_file() else None for path in saved]
    assert texts[0] == texts[1]
    assert (texts[0] is not None) == (kind == "correct_result")


@pytest.mark.long
def test_torchrun_restarts_all_ranks(tmp_path: Path) -> None:
    """A rank is killed in the first start; the second start continues from the checkpoint."""
    stock = train(tmp_path / "stock", GPT, 2, *TP2_SP, *MORE)
    run, saved = tmp_path / "run", tmp_path / "saved"
    wrapper = tmp_path / "pretrain.py"
    wanted = "(os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']) == ('1', '0')"
    steps = str(run / "steps-rank0.jsonl")
    wrapper.write_text(AT_STEP.format(wanted=wanted, steps=steps, at=7, number="SIGKILL", script=str(GPT)))
    places = ("--save", str(saved), "--load", str(saved), "--save-interval", "3", "--overlap-config", config(tmp_path))
    command = [sys.executable, *shlex.split("-m torch.distributed.run --nproc-per-node 2 --max-restarts 1")]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += ["-m", "megatron_overlap", str(wrapper), *NO_GPU, *TINY, *TP2_SP, *MORE, *places]
    command += ["--overlap-device", "cpu", "--overlap-run-dir", str(run)]
    # Else the second start finds addresses of the first in torchrun's store, which gloo then connects to (torch 2.13).
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    mark = {"STARTED_BY_TEST": str(tmp_path)}
    environment = {**os.environ, **own_store, **mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    try:
        with log.open("w") as output:
            done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=300, check=False)
    finally:
        # A rank that gets SIGKILL under torchrun leaves the process behind in which Megatron writes checkpoints.
        end_marked(mark)
    assert done.returncode == 0, log.read_text()[-4000:]
    made = rows(run)
    assert max(made) == 30
    assert_equal_training(made, stock)
    assert int((saved / "latest_checkpointed_iteration.txt").read_text()) == 30
