"""Starts real Megatron runs, one process per rank, and reads what the recorder wrote."""

import json
import os
import shlex
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_overlap.tools.launch.processes import free_port
from tests.helpers.forked import ForkedProgram

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"

NO_GPU = shlex.split(
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion "
    "--no-persist-layer-norm --no-rope-fusion --attention-backend unfused --use-cpu-initialization"
)
TE_LAYERS = ["--transformer-impl", "transformer_engine"]
# The vocabulary is padded to a multiple of (divisor x tensor size): 128 whatever the layout.
TINY = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr 1e-3 "
    "--min-lr 1e-4 --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 "
    "--make-vocab-size-divisible-by 32 --eval-iters 0 --eval-interval 1000 --hidden-dropout 0 "
    "--attention-dropout 0 --log-interval 1 --seed 42"
)
PLUGIN_OFF = {"MEGATRON_OVERLAP": "0"}
TP2_SP = shlex.split("--tensor-model-parallel-size 2 --sequence-parallel")


def start_ranks(
    world_size: int,
    argv: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    timeout_s: float = 120.0,
    program: Sequence[str] = ("-m", "megatron_overlap"),
) -> list[subprocess.CompletedProcess[str]]:
    """Runs ``python PROGRAM argv`` on every rank and waits for all; none outlives the call.

    The ranks are forks of a process that has imported torch, not Megatron.
    """
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        try:
            for rank in range(world_size):
                rank_env = {
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(world_size),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    **(env or {}),
                }
                ranks.append(ForkedProgram(program, argv, rank_env, Path(folder) / f"rank{rank}"))
            return [rank.wait(timeout_s) for rank in ranks]
        finally:
            for each in ranks:
                each.kill()


def train(run_dir: Path, script: Path, world_size: int, *flags: str, off: bool = True) -> dict[int, dict[str, Any]]:
    """Trains the tiny model; returns the recorded rows of rank 0 by iteration."""
    argv = [str(script), *NO_GPU, *TINY, *flags, "--overlap-device", "cpu", "--overlap-run-dir", str(run_dir)]
    for rank, done in enumerate(start_ranks(world_size, argv, env=PLUGIN_OFF if off else None)):
        assert done.returncode == 0, f"rank {rank}:\n{done.stdout[-4000:]}"
    return rows(run_dir)


def rows(run_dir: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """What the recorder wrote of a run, by iteration."""
    lines = (run_dir / f"steps-rank{rank}.jsonl").read_text().splitlines()
    return {row["iteration"]: row for row in map(json.loads, lines)}


def assert_equal_training(actual: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]]) -> None:
    """fp32, the same sums in another order: 1e-5 relative, the tolerance of every layout comparison here."""
    assert actual
    for iteration, row in actual.items():
        for key in ("loss", "grad_norm"):
            wanted = expected[iteration][key]
            assert abs(row[key] - wanted) <= 1e-5 * abs(wanted), f"iteration {iteration}, {key}: {row[key]} {wanted}"
