"""`plan`: commands and environments of a config, and configs that it refuses before any process starts."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.config import ConfigError, LaunchConfig, to_megatron_args
from megatron_overlap.tools.launch import plan as plan_module
from megatron_overlap.tools.launch.plan import execute, over_loopback, plan
from megatron_overlap.tools.launch.processes import MALLOC_ENV, RunError

SCRIPTS = Path(__file__).parents[3] / "scripts"
RUN_DIR = Path("/runs/first")


def config(**launch: Any) -> LaunchConfig:
    return LaunchConfig.model_validate(
        {
            "name": "tiny",
            "model": {"preset": "llama_tiny"},
            "parallel": {"tensor": 2, "sequence_parallel": True},
            "train": {"seq_length": 128, "global_batch_size": 252 * 4, "iterations": 2, "precision": "fp32"},
            "launch": {"device": "cpu", **launch},
        }
    )


HOSTS = {"hosts": 2, "ranks_per_host": 2, "gbps": 0.5}


def test_ranks_over_loopback() -> None:
    cfg = config(threads_per_rank=3)
    planned = plan(cfg, RUN_DIR)
    assert planned.lab is None
    assert [command.rank for command in planned.commands] == [0, 1]
    for command in planned.commands:
        assert list(command.argv) == [
            *(sys.executable, "-m", "megatron_overlap", str(SCRIPTS / "pretrain_llama.py")),
            *to_megatron_args(cfg),
            *("--overlap-config", "/runs/first/config.yaml", "--overlap-run-dir", "/runs/first"),
        ]
        port = command.env["MASTER_PORT"]
        assert dict(command.env) == {
            "RANK": str(command.rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": str(command.rank),
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "OMP_NUM_THREADS": "3",
            **{name: value for name, value in MALLOC_ENV.items() if name not in os.environ},
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }
        assert port == planned.commands[0].env["MASTER_PORT"]


def test_malloc_settings_of_the_user_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000")
    monkeypatch.delenv("MALLOC_MMAP_MAX_", raising=False)
    env = plan(config(), RUN_DIR).commands[0].env
    assert "MALLOC_TRIM_THRESHOLD_" not in env
    assert env["MALLOC_MMAP_MAX_"] == "0"


def test_ranks_on_hosts() -> None:
    planned = plan(config(hosts=HOSTS), RUN_DIR)
    assert planned.lab is not None
    assert (planned.lab.hosts, planned.lab.ranks_per_host) == (2, 2)
    assert planned.lab.links[0].gbps == 0.5
    assert [command.host[-2:] for command in planned.commands] == ["h0", "h0", "h1", "h1"]
    assert [command.env["LOCAL_RANK"] for command in planned.commands] == ["0", "1", "0", "1"]
    assert {command.env["LOCAL_WORLD_SIZE"] for command in planned.commands} == {"2"}
    assert {command.env["MASTER_ADDR"] for command in planned.commands} == {planned.lab.address(0)}
    assert {command.env["GLOO_SOCKET_IFNAME"] for command in planned.commands} == {"eth0"}
    assert "2 hosts" in planned.link
    assert "0.5 Gbit/s" in planned.link


def test_over_loopback_keeps_the_ranks() -> None:
    cfg = over_loopback(config(hosts=HOSTS))
    assert cfg.launch.hosts is None
    assert cfg.world_size == 4
    assert cfg.data_parallel_size == 2
    assert len(plan(cfg, RUN_DIR).commands) == 4


def test_one_node_of_gpus() -> None:
    cfg = config(device="cuda", ranks_per_node=4)
    (command,) = plan(cfg, RUN_DIR).commands
    assert shlex.join(command.argv[1:]).startswith(
        "-m torch.distributed.run --nnodes 1 --nproc-per-node 4 --standalone --max-restarts 0"
        f" --log-dir /runs/first/logs/torchrun --tee 3 -m megatron_overlap {SCRIPTS}/pretrain_llama.py --num-layers "
    )
    assert command.env == {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def test_the_number_of_queues_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blackwell needs no single queue, and a Hopper run may prefer to overlap experts. Megatron checks the value."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    (command,) = plan(config(device="cuda"), RUN_DIR).commands
    assert command.env["CUDA_DEVICE_MAX_CONNECTIONS"] == "32"


def test_without_tensor_ranks_the_number_of_queues_is_not_set() -> None:
    cfg = config(device="cuda").model_dump()
    cfg["parallel"] = {"tensor": 1, "sequence_parallel": False}
    (command,) = plan(LaunchConfig.model_validate(cfg), RUN_DIR).commands
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in command.env


@pytest.mark.parametrize("flag", ["--use-torch-fsdp2", "--use-megatron-fsdp"])
def test_fully_sharded_models_have_no_number_of_queues(flag: str) -> None:
    """Megatron refuses one connection with them."""
    cfg = config(device="cuda").model_dump() | {"megatron_args": [flag]}
    (command,) = plan(LaunchConfig.model_validate(cfg), RUN_DIR).commands
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in command.env


@pytest.mark.parametrize("changed", [{"untie_embeddings": False}, {"swiglu": False}, {"add_bias": True}])
def test_a_llama_with_other_switches_runs_the_script_that_adds_none(changed: dict[str, Any]) -> None:
    """`pretrain_llama.py` would add the flags that this model turns off."""
    cfg = config().model_dump()
    cfg["model"] |= changed
    arguments = plan(LaunchConfig.model_validate(cfg), RUN_DIR).commands[0].argv
    assert arguments[3] == f"{SCRIPTS}/pretrain_gpt.py"
    assert arguments[arguments.index("--normalization") + 1] == "RMSNorm"
    assert arguments[arguments.index("--position-embedding-type") + 1] == "rope"


@pytest.mark.parametrize(("given", "shown"), [("n0:29400", "n0:29400"), (None, "HEAD_NODE:29400")])
def test_several_nodes_of_gpus(given: str | None, shown: str) -> None:
    planned = plan(config(device="cuda", nodes=2, ranks_per_node=2), RUN_DIR, rendezvous=given)
    line = shlex.join(planned.commands[0].argv)
    assert f"--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint {shown} --rdzv-id tiny" in line
    assert "--standalone" not in line
    assert "all 2 nodes" in planned.link


def test_each_node_has_a_folder_of_logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run directory may be on a file system that all nodes share."""
    folders = []
    monkeypatch.setattr(plan_module, "_require_gpus", lambda cfg: None)
    monkeypatch.setattr(plan_module, "run_ranks", lambda *_, log_dir, **__: folders.append(log_dir))
    for nodes, host in ((2, "n0"), (2, "n1"), (1, "n0")):
        monkeypatch.setattr(plan_module.socket, "gethostname", lambda host=host: host)
        rendezvous = "n0:29400" if nodes > 1 else None
        execute(plan(config(device="cuda", nodes=nodes, ranks_per_node=2), tmp_path, rendezvous=rendezvous))
    assert folders == [tmp_path / "logs/n0", tmp_path / "logs/n1", tmp_path / "logs"]


def test_a_run_directory_that_cannot_be_made_is_one_line() -> None:
    with pytest.raises(ConfigError, match="command line: launch --run-dir: /dev/null/x: Not a directory; give a path"):
        execute(plan(config(), Path("/dev/null/x")))


def test_a_script_of_the_user(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.touch()
    assert plan(config(entry=str(script)), RUN_DIR).commands[0].argv[3] == str(script)


@pytest.mark.parametrize(
    ("launch", "line"),
    [
        ({"entry": "/no/such.py"}, "tiny: launch.entry: /no/such.py: no such file; give the path"),
    ],
)
def test_an_impossible_launch_is_refused(launch: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(config(**launch), RUN_DIR)
    assert str(caught.value).startswith(line)


def test_rendered_plan() -> None:
    text = plan(config(hosts=HOSTS), RUN_DIR).render()
    assert "# rank 3 on mo" in text
    assert "RANK=3 WORLD_SIZE=4" in text
    assert "  num_layers: " in text
    assert "run directory: /runs/first" in text


@pytest.mark.long
def test_torchrun_ranks_end_after_a_failure(tmp_path: Path) -> None:
    """Runs the torchrun command for GPUs with a script that uses no GPU."""
    entry = tmp_path / "mine.py"
    entry.write_text(
        "import os, pathlib, sys, time\nprint('here', os.environ['RANK'], os.environ['WORLD_SIZE'], flush=True)\n"
        f"other = pathlib.Path({str(tmp_path / 'here0')!r})\n"
        "if os.environ['RANK'] == '0':\n    other.touch()\n    time.sleep(600)\n"
        "while not other.exists():\n    time.sleep(0.05)\n"
        "time.sleep(1)\nsys.exit(7)\n"
    )
    lines: list[str] = []
    planned = plan(config(device="cuda", entry=str(entry), timeout_s=120.0), tmp_path / "run")
    with pytest.raises(RunError, match="rank 0 on this node: exit code 1"):
        execute(planned, on_line=lambda rank, line: lines.append(line))
    assert {"[default0]:here 0 2", "[default1]:here 1 2"} <= set(lines)
    assert any("exitcode" in line and "7" in line for line in lines)
