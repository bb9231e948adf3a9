"""`megatron-overlap launch` as a command line, with the installed Megatron."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.config import load_launch_config
from tests.helpers.forked_python import ForkedPython
from tests.helpers.netlab import available
from tests.tools.launch.test_netlab import NO_NAMESPACES
from tests.tools.launch.watch import new_token, wait_for, with_token

ROOT = Path(__file__).parents[3]
LAUNCH = [sys.executable, "-B", "-m", "megatron_overlap.cli", "launch"]
CONFIG = """
name: tiny
model: {{preset: llama_tiny, num_layers: 1}}
parallel: {{tensor: 2, sequence_parallel: true}}
train: {{seq_length: 64, global_batch_size: 2, iterations: 2, precision: fp32}}
overlap: {{tensor: {{autotune_cache: {folder}/autotune}}}}
launch: {{device: cpu, output_dir: {folder}/runs, timeout_s: 200, hosts: {{hosts: 2, gbps: 1.0}}}}
"""
NEEDS_NETLAB = pytest.mark.skipif(not available()[0], reason=available()[1])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def start(
    *args: str | Path, python: ForkedPython | None = None, prefix: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    command = [*prefix, *(LAUNCH if python is None else [*python.cli, "launch"]), *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


def test_a_dry_run_prints_the_plan_and_writes_no_file(config: Path, tmp_path: Path) -> None:
    done = start(config, "--dry-run", "train.iterations=7")
    assert done.returncode == 0, done.stderr
    assert "--train-iters 7" in done.stdout
    assert "RANK=1 WORLD_SIZE=2" in done.stdout
    assert list(tmp_path.iterdir()) == [config]


@NEEDS_NETLAB
@pytest.mark.long
def test_launch_trains_prints_progress_and_the_run_directory(
    forked_python: ForkedPython, config: Path, tmp_path: Path
) -> None:
    done = start(config, python=forked_python)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^iteration 1/2: [\d.]+ ms, lm loss [\d.]+, grad norm [\d.]+", done.stdout, re.MULTILINE)
    assert re.search(r"^iteration 2/2: ", done.stdout, re.MULTILINE)
    assert done.stdout.count("iteration 2/2") == 1
    assert "megatron_overlap is " in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert done.stdout.splitlines()[-1].endswith(f"run directory: {run_dir}")
    steps = [json.loads(line) for line in (run_dir / "steps-rank1.jsonl").read_text().splitlines()]
    assert [step["iteration"] for step in steps] == [1, 2]
    assert load_launch_config(run_dir / "config.yaml") == load_launch_config(config)


def test_a_terminal_without_utf8_shows_escapes(config: Path, tmp_path: Path) -> None:
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "PYTHONCOERCECLOCALE": "0"}

    def started(*args: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*LAUNCH, str(config), *map(str, args)]
        env = os.environ | ascii_only
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240, env=env)

    config.write_text(config.read_text().replace("/runs", "/r\u00fcns").replace("hosts: {hosts: 2", "# "), "utf-8")
    config.write_text(re.sub(r", # .*", "}", config.read_text("utf-8")), "utf-8")
    assert "/r\\xfcns/tiny-" in started("--dry-run").stdout
    assert "the text is not ASCII" in started("--emit-slurm").stderr
    job = tmp_path / "j\u00f6b.sh"
    assert started("--emit-slurm", job).returncode == 0
    assert "/r\u00fcns" in job.read_text("utf-8")


FAILING_RANK = """
import os, signal, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    print("rank 1 kills itself", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(torch.ones(4))
"""


@NEEDS_NETLAB
def test_a_failed_rank_ends_the_launch_and_is_named(forked_python: ForkedPython, config: Path, tmp_path: Path) -> None:
    entry = tmp_path / f"{new_token()}.py"
    entry.write_text(FAILING_RANK)
    done = start(config, f"launch.entry={entry}", "--run-dir", tmp_path / "mine", python=forked_python)
    assert done.returncode == 1
    assert re.match(r"tiny: rank 1 on mo\d+h1: killed by SIGKILL; all ranks have ended; log: ", done.stderr)
    assert "  | rank 1 kills itself" in done.stderr
    assert str(tmp_path / "mine" / "logs" / "rank1.log") in done.stderr
    assert with_token(entry.stem) == []


def test_the_error_of_rank_0_ends_its_output(config: Path, tmp_path: Path) -> None:
    """Not the report, of which the last lines would be shown instead."""
    entry = tmp_path / "failing.py"
    entry.write_text(
        "import os, time\nif os.environ['RANK'] == '0':\n    raise OSError('the disk is full')\ntime.sleep(99)"
    )
    done = start(config, f"launch.entry={entry}", "launch.hosts=null", "launch.ranks_per_node=2", "--run-dir", tmp_path)
    assert done.returncode == 1
    assert "rank 0 on localhost: exit code 1" in done.stderr
    assert "OSError: the disk is full" in done.stderr.splitlines()[-1]
    assert (tmp_path / "report-rank0.json").exists()


@NEEDS_NETLAB
def test_ctrl_c_ends_all_ranks(config: Path, tmp_path: Path) -> None:
    entry = tmp_path / f"{new_token()}.py"
    entry.touch()
    command = [*LAUNCH, str(config), f"launch.entry={entry}"]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("tiny: 2 processes, 2 hosts on this machine")
    assert wait_for(lambda: len(with_token(entry.stem)) >= 4)
    os.kill(launcher.pid, signal.SIGINT)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    assert errors.strip() == "tiny: interrupted; all ranks have ended"
    assert wait_for(lambda: not with_token(entry.stem), 5)


FORBIDDEN = ("unshare", "-Ur", "sh", "-c", f'{NO_NAMESPACES}; ip link set lo up 2>/dev/null; exec "$@"', "sh")


def test_without_permission_for_namespaces_launch_fails_or_reports_loopback(
    forked_python: ForkedPython, config: Path, tmp_path: Path
) -> None:
    entry = tmp_path / "mine.py"
    entry.write_text("import os; print('megatron_overlap is at', os.environ['MASTER_ADDR'])")
    done = start(config, f"launch.entry={entry}", prefix=FORBIDDEN)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "/proc/sys/user/max_net_namespaces is 0" in line
    assert line.endswith("launch.hosts.fallback=loopback runs without limited links")
    fallback = "launch.hosts.fallback=loopback"
    done = start(config, f"launch.entry={entry}", fallback, python=forked_python, prefix=FORBIDDEN)
    assert done.returncode == 0, done.stderr
    assert "running over loopback without a rate limit" in done.stderr
    assert "megatron_overlap is at 127.0.0.1" in done.stdout
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "hosts: null" in (run_dir / "config.yaml").read_text()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (
            ["launch.hosts.hosts=252", "train.global_batch_size=126"],
            "{config} (override): launch.hosts.hosts: 252: use a whole number",
        ),
        (["launch.entry=/no/such.py"], "{config} (override): launch.entry: /no/such.py: no such file"),
        (
            ["train.save=/proc/a"],
            "{config} (override): train.save: /proc/a: cannot be written (no such file or directory)",
        ),
        (
            ["launch.device=cuda", "launch.hosts=null", "launch.ranks_per_node=64", "train.global_batch_size=32"],
            "{config}: launch.device: cuda: torch finds",
        ),
        (["--rendezvous", "a:b"], "command line: launch --rendezvous: a:b: give HOST:PORT"),
        (["launch.hosts.gpbs=1"], "{config} (override): launch.hosts.gpbs: 1: unknown key; did you mean gbps?"),
        (
            ["launch.device=cuda", "launch.hosts=null", "launch.nodes=2"],
            "command line: launch --rendezvous: missing: launch.nodes is 2: give HOST:PORT of the first node",
        ),
        (
            ["launch.device=cuda", "launch.hosts=null", "launch.nodes=2", "--rendezvous", "a:1"],
            "command line: launch --run-dir: missing: launch.nodes is 2: give a folder that all nodes share",
        ),
        (["launch.device=cuda"], "{config} (override): launch.device: cuda: launch.hosts needs cpu"),
    ],
)
def test_a_wrong_request_prints_one_line(
    arguments: list[str], line: str, config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["launch", str(config), *arguments]) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line.format(config=config)), shown
    assert list(tmp_path.iterdir()) == [config]
