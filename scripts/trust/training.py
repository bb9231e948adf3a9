"""Faults in real Megatron trainings: TP2 + SP x DP2 with the distributed optimizer, on four processes without a GPU."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import yaml

from megatron_overlap.tools.launch.processes import free_port
from scripts.trust.rank import Case, Outcome

ROOT = Path(__file__).resolve().parents[2]
MODEL = shlex.split(
    "--num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 127 --make-vocab-size-divisible-by 32 --eval-iters 0 "
    "--eval-interval 1000 --hidden-dropout 0 --attention-dropout 0 --log-interval 1 --seed 42 "
    "--transformer-impl local --distributed-backend gloo --no-gradient-accumulation-fusion --no-masked-softmax-fusion "
    "--no-bias-gelu-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion --no-persist-layer-norm --no-rope-fusion "
    "--attention-backend unfused --use-cpu-initialization --tensor-model-parallel-size 2 --sequence-parallel "
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 3000 "
    # Of Megatron's own collectives, in which a rank may wait for the stopped one as well.
    "--distributed-timeout-minutes 1"
)
KINDS = ("training: SIGKILL", "training: SIGSTOP", "training: other config", "training: restart")
RANKS, DEADLINE_S, START_S, BEYOND_S = 4, 10.0, 240.0, 90.0


class Training:
    """Four ranks of `scripts/pretrain_gpt.py` under the plugin."""

    def __init__(self, folder: Path, steps: int, extra: Sequence[str] = (), odd_rank: int | None = None) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        self.processes = []
        for rank in range(RANKS):
            overlap = {
                "tensor": {"method": "p2p", "chunks_per_rank": 3 if rank == odd_rank else 2},
                "timeout_s": DEADLINE_S,
            }
            config = folder / f"overlap{rank}.yaml"
            config.write_text(yaml.safe_dump({"overlap": overlap}))
            argv = [sys.executable, "-m", "megatron_overlap", str(ROOT / "scripts" / "pretrain_gpt.py"), *MODEL]
            argv += ["--train-iters", str(steps), "--overlap-device", "cpu", "--overlap-run-dir", str(folder)]
            argv += ["--overlap-config", str(config), *extra]
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            environment.pop("LD_PRELOAD", None)
            log = (folder / f"rank{rank}.log").open("wb")
            with log:
                self.processes.append(
                    subprocess.Popen(
                        argv, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )

    def steps(self) -> dict[int, tuple[float, float]]:
        """Loss and grad-norm of every step that rank 0 has done."""
        path = self.folder / "steps-rank0.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["iteration"]: (row["loss"], row["grad_norm"]) for row in rows}

    def wait_for_step(self, number: int) -> bool:
        """Whether it came in time."""
        until = time.monotonic() + START_S
        while time.monotonic() < until and all(process.poll() is None for process in self.processes):
            if max(self.steps(), default=0) >= number:
                return True
            time.sleep(0.05)
        return False

    def wait(self, but: int | None, limit_s: float) -> list[int | None]:
        """Exit codes, None for those that have not ended in time; `but` is not waited for."""
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            if all(process.poll() is not None for rank, process in enumerate(self.processes) if rank != but):
                break
            time.sleep(0.05)
        return [process.poll() for process in self.processes]

    def said(self) -> str:
        """What all ranks printed."""
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("rank*.log")))

    def end(self) -> None:
        """Leaves no process, not those either that Megatron started in a rank that was killed."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_trainings(count: int, seed: int) -> list[Outcome]:
    """`count` faults in trainings, of each kind in turn."""
    draw, found = random.Random(seed), []
    for number in range(count):
        case = Case(KINDS[number % len(KINDS)], "training", draw.randrange(RANKS), draw.randrange(1 << 30), DEADLINE_S)
        outcome = Outcome(case)
        with tempfile.TemporaryDirectory(prefix="faults-training-") as folder:
            if case.kind == "training: restart":
                _restart(outcome, Path(folder), draw)
            else:
                _fault(outcome, Path(folder), draw)
        found.append(outcome)
        print(f"{case.kind}: {outcome.took_s:.1f} s: {outcome.unexpected or 'as asked for'}", flush=True)
    return found


def _fault(outcome: Outcome, folder: Path, draw: random.Random) -> None:
    case = outcome.case
    odd = case.victim if case.kind == "training: other config" else None
    training = Training(folder, 100_000, odd_rank=odd)
    try:
        if odd is None:
            if not training.wait_for_step(draw.randint(1, 5)):
                outcome.unexpected.append(f"did not get as far as its fault: {training.said()[-500:]}")
                return
            number = signal.SIGKILL if case.kind.endswith("SIGKILL") else signal.SIGSTOP
            training.processes[case.victim].send_signal(number)
        start = time.monotonic()
        limit_s = START_S if odd is not None else 2 * DEADLINE_S + BEYOND_S
        codes = training.wait(case.victim if odd is None else None, limit_s)
        outcome.took_s = time.monotonic() - start
        said, wanted = training.said(), 2 if odd is not None else 1
        survivors = [rank for rank in range(RANKS) if odd is not None or rank != case.victim]
        outcome.hangs = sum(codes[rank] is None for rank in survivors)
        outcome.unexpected += [f"rank {rank} ended with {codes[rank]}" for rank in survivors if codes[rank] != wanted]
        outcome.named = f"rank {case.victim}" in said
        if odd is not None and training.steps():
            outcome.unexpected.append("a step was made")
        if odd is None and not list(folder.glob("overlap-failure-rank*.json")):
            outcome.unexpected.append("no survivor wrote what it did last")
    finally:
        training.end()


def _restart(outcome: Outcome, folder: Path, draw: random.Random) -> None:
    """Killed at some step, resumed from its checkpoint: the losses of a run that nobody disturbed."""
    steps, saved = 6, folder / "saved"
    # The one that is killed is told of more steps: the rate goes down as in the others all the same.
    rate = ["--lr-decay-iters", str(steps), "--override-opt_param-scheduler"]
    save = [*rate, "--save", str(saved), "--load", str(saved), "--save-interval", "2"]
    whole, broken = Training(folder / "whole", steps, rate), None
    try:
        codes = whole.wait(None, START_S)
        wanted = whole.steps()
        if codes != [0] * RANKS:
            outcome.unexpected.append(f"the undisturbed run ended with {codes}")
            return
        broken = Training(folder / "broken", 100_000, save)
        if not broken.wait_for_step(draw.randint(3, 4)):
            outcome.unexpected.append(f"did not get as far as its fault: {broken.said()[-500:]}")
            return
        broken.processes[outcome.case.victim].kill()
        start = time.monotonic()
        outcome.hangs = sum(code is None for code in broken.wait(None, 2 * DEADLINE_S + BEYOND_S))
        outcome.took_s = time.monotonic() - start
        outcome.named = f"rank {outcome.case.victim}" in broken.said()
        broken.end()
        broken = Training(folder / "again", steps, save)
        codes, got = broken.wait(None, START_S), broken.steps()
        if codes != [0] * RANKS or not got or min(got) < 3 or max(got) != steps:
            outcome.unexpected.append(f"resumed: {codes}, steps {sorted(got)}: {broken.said()[-500:]}")
        for number, values in got.items():
            pairs = zip(values, wanted[number], strict=True)
            outcome.wrong += any(abs(mine - right) > 1e-5 * abs(right) for mine, right in pairs)
    finally:
        whole.end()
        if broken is not None:
            broken.end()
