"""The Slurm batch file: its text, and its execution by bash with replacements of `srun` and `scontrol`."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_overlap import cli
from megatron_overlap.config import LaunchConfig, load_launch_config, without_overlap
from megatron_overlap.tools.launch.plan import batch_file

STAND_IN = Path(__file__).with_name("slurm_stand_in.py")
ROOT = Path(__file__).parents[3]


def content(folder: Path, slurm: dict[str, Any] | None = None, **launch: Any) -> dict[str, Any]:
    return {
        "name": "tiny",
        "model": {"preset": "llama_tiny", "num_layers": 1},
        "parallel": {"tensor": 2, "sequence_parallel": True},
        "train": {"seq_length": 64, "global_batch_size": 4, "iterations": 3, "precision": "fp32"},
        "overlap": {"tensor": {"method": "p2p"}},
        "launch": {
            "device": "cpu",
            "output_dir": str(folder / "out put"),
            "slurm": {"python": sys.executable, **(slurm or {})},
            **launch,
        },
    }


def write(folder: Path, **keys: Any) -> Path:
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump(content(folder, **keys)))
    return path


def emit(*argv: str | Path) -> int:
    return cli.main(["launch", *map(str, argv)])


def run(job: Path, task: int | None, output: Path) -> subprocess.CompletedProcess[str]:
    """Run the batch file as sbatch does on the first node."""
    tools = job.parent / "tools"
    tools.mkdir(exist_ok=True)
    for name in ("srun", "scontrol"):
        tool = tools / name
        tool.write_text(f"#!{sys.executable}\n" + STAND_IN.read_text())
        tool.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT) + os.pathsep + os.environ.get("PYTHONPATH", ""),
        "STAND_IN_SAID": str(output),
        "SLURM_JOB_ID": str(os.getpid() + (task or 0)),
        "SLURM_JOB_NODELIST": "localhost,localhost",
    }
    if task is not None:
        env |= {"SLURM_ARRAY_JOB_ID": "77", "SLURM_ARRAY_TASK_ID": str(task)}
    started = subprocess.Popen(
        ["bash", str(job)],
        env=env,
        cwd=job.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        output, errors = started.communicate(timeout=280)
        return subprocess.CompletedProcess(started.args, started.returncode, output, errors)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)  # end the tasks of a job that hangs


@pytest.mark.long
def test_a_task_of_an_array_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One task per rank runs the config with the overlap."""
    job = tmp_path / "job.sh"
    config = write(tmp_path, slurm={"tasks": "ranks", "setup": ["export SEEN='it is'"]})
    assert emit(config, "--emit-slurm", job, "--baseline", "self", "train.seed=7") == 0
    assert "sbatch" in capsys.readouterr().out
    done = run(job, 1, tmp_path / "output")
    assert done.returncode == 0, done.stdout + done.stderr
    run_dir = tmp_path / "out put" / "tiny-77"
    assert load_launch_config(run_dir / "config.yaml") == load_launch_config(config, ["train.seed=7"])
    for rank in (0, 1):
        steps = [json.loads(line) for line in (run_dir / f"steps-rank{rank}.jsonl").read_text().splitlines()]
        assert [step["iteration"] for step in steps] == [1, 2, 3]
        assert json.loads((run_dir / f"report-rank{rank}.json").read_text())["totals"]["overlapped"] > 0
    log = (tmp_path / "out put" / "tiny-77.log").read_text()
    assert len(re.findall(r"iteration +\d/ +3 \| .*elapsed time per iteration", log)) == 3


SHOW = """
import json, os, sys
numbers = [os.environ[key] for key in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")]
print(json.dumps([numbers, sys.argv[1:]]), flush=True)
"""


@pytest.mark.long
def test_torchrun_on_two_nodes_numbers_ranks_by_node(tmp_path: Path) -> None:
    """Runs the torchrun command for GPUs with a script that uses no GPU."""
    entry = tmp_path / "show.py"
    entry.write_text(SHOW)
    off = {"device": "cuda", "nodes": 2, "ranks_per_node": 1, "entry": str(entry)}
    config = LaunchConfig.model_validate(content(tmp_path, **off))
    job = tmp_path / "job.sh"
    job.write_text(batch_file([without_overlap(config), config]))
    done = run(job, 0, tmp_path / "output")
    assert done.returncode == 0, done.stdout + done.stderr
    seen = sorted(json.loads(line) for line in done.stdout.splitlines() if line.startswith("[["))
    assert [numbers for numbers, _ in seen] == [["0", "2", "0", "0"], ["1", "2", "0", "1"]]
    arguments = seen[0][1]
    run_dir = tmp_path / "out put" / "tiny_baseline-77"
    assert arguments[arguments.index("--overlap-config") + 1] == str(run_dir / "config.yaml")
    assert arguments[arguments.index("--overlap-run-dir") + 1] == str(run_dir)
    assert load_launch_config(run_dir / "config.yaml") == without_overlap(config)


def test_slurm_directives_and_bash_syntax(tmp_path: Path) -> None:
    slurm = {
        "account": "lab",
        "partition": "batch",
        "time": "01:00:00",
        "directives": ["--exclusive"],
        "container_image": "registry#nemo:25.11",
        "container_mounts": ["/data:/data"],
        "setup": ["echo 'quotes'"],
    }
    config = LaunchConfig.model_validate(
        content(tmp_path, slurm=slurm, device="cuda", nodes=2, ranks_per_node=4, entry="/opt/in/the/image.py")
    )
    text = batch_file([config])
    assert subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True).returncode == 0
    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "--job-name=tiny",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--account=lab",
        "--partition=batch",
        "--time=01:00:00",
        "--exclusive",
    ]
    # Slurm reads directives up to the first command.
    assert text.index("set -euo") > text.rindex("#SBATCH")
    assert "--nnodes 2 --nproc-per-node 4" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=1" in text
    assert "  /opt/in/the/image.py\n" in text
    job, output = tmp_path / "job.sh", tmp_path / "output"
    job.write_text(text.replace(f"exec {sys.executable} ", "exec false "))
    assert run(job, None, output).returncode == 1, "a task failed, and so must the job, through the pipe to tee"
    options = json.loads(output.read_text())
    assert "--container-image=registry#nemo:25.11" in options
    mounts = next(option for option in options if option.startswith("--container-mounts="))
    assert mounts == f"--container-mounts={tmp_path}:{tmp_path},{tmp_path}/out put:{tmp_path}/out put,/data:/data"
    assert f"--container-workdir={tmp_path}" in options


def test_without_a_file_the_text_goes_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = write(tmp_path)
    assert emit(config, "--emit-slurm") == 0
    assert capsys.readouterr().out == batch_file([load_launch_config(config)], "FILE")


def test_two_configs_become_an_array(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configs = ROOT / "configs"
    pair = [configs / "gpu" / "gpt3_175b_tp8_pp8" / f"{kind}.yaml" for kind in ("overlap", "baseline")]
    assert emit(pair[0], "--emit-slurm", "--baseline", pair[1]) == 0
    text = capsys.readouterr().out
    assert "#SBATCH --array=0-1\n" in text
    assert text.index("0) NAME=gpt3_175b_tp8_pp8_baseline") < text.index("1) NAME=gpt3_175b_tp8_pp8_overlap")


def test_a_gpu_launch_has_three_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", "gpu/gpt3_13b_tp8/overlap", "--emit-slurm", "--baseline", "self"]) == 0
    text, names = capsys.readouterr().out, [f"gpt3_13b_tp8_overlap{kind}" for kind in ("_baseline", "", "_userbuffers")]
    assert "#SBATCH --array=0-2\n" in text
    assert "#SBATCH --job-name=gpt3_13b_tp8_overlap\n" in text
    assert f"compare --logs {' '.join(f'runs/{name}-JOB.log' for name in names)}\n" in text
    runs = [text.index(f"{task}) NAME={name}") for task, name in enumerate(names)]
    assert runs == sorted(runs)
    assert [text.count("--tp-comm-overlap", start) for start in runs] == [1, 1, 1], "the last run has it, once"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--emit-slurm", "a", "b"], "command line: launch --emit-slurm: a b: give at most one file name"),
        (
            ["--emit-slurm", "/no/folder/job.sh"],
            "command line: launch --emit-slurm: /no/folder/job.sh: No such file or",
        ),
        (["--baseline", "self"], "command line: launch --baseline: self: needs --emit-slurm; to run both here:"),
        (["--emit-slurm", "--baseline", "{config}"], "{config}: name: tiny: must differ from that in {config}"),
        (
            ["--emit-slurm", "--baseline", str(ROOT / "configs" / "cpu" / "llama_tp2" / "baseline.yaml")],
            "tiny: launch.output_dir: ",
        ),
        (
            ["--emit-slurm", "launch.hosts={{hosts: 2, gbps: 1}}"],
            "tiny: launch.hosts: 2: network namespaces are on one machine",
        ),
        (
            ["--emit-slurm", "launch.slurm.directives=[exclusive]"],
            "{config} (override): launch.slurm.directives.0: exclusive: write one option of sbatch",
        ),
        (
            ["--emit-slurm", "launch.slurm.time=1 hour"],
            "{config} (override): launch.slurm.time: 1 hour: write it without spaces",
        ),
        (
            ["--emit-slurm", "launch.slurm.container_mounts=[/a:/b]"],
            "{config} (override): launch.slurm.container_mounts.0: /a:/b: needs launch.slurm.container_image",
        ),
        (["--emit-slurm", "launch.slurm.tasks=both"], "{config} (override): launch.slurm.tasks: both: "),
    ],
)
def test_a_wrong_request_prints_one_line(
    argv: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path)
    assert emit(config, *(word.format(config=config) for word in argv)) == 2
    (shown,) = capsys.readouterr().err.splitlines()
    assert shown.startswith(line.format(config=config)), shown
