"""One rank of a fault case: a process forked from one that has torch, so that a case costs no imports."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_overlap.comm import TransportError, TransportOptions
from megatron_overlap.comm.gloo import GlooTransport
from megatron_overlap.comm.host_group import store_beside
from megatron_overlap.diagnostics.consistency import compare
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.diagnostics.heartbeat import Heartbeat
from scripts.trust.work import CorruptionError, Work
from tests.helpers.faulty import CorruptTransport

GENERATION = "generation"
"""The load of `scripts.trust.generation`; the others are those of `scripts.trust.work`."""
DONE, WAIT_FAILED, DIFFERS, WRONG, FOUND, OTHER = 0, 1, 2, 3, 4, 5
STUCK_S = 22.0
"""A rank that is still there then shows where."""
CALM_STEPS = 12
"""Steps after a fault that a run has to survive."""


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        kind: of the fault.
        load: what is computed.
        victim: the rank it happens to.
        seed: of when, and of other choices.
        deadline_s: of a wait.
        size: ranks.
    """

    kind: str
    load: str
    victim: int
    seed: int
    deadline_s: float
    size: int = 4


@dataclass
class Outcome:
    """What came of a case."""

    case: Case
    codes: list[int | None] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    took_s: float = 0.0
    hangs: int = 0
    wrong: int = 0
    unexpected: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    named: bool = False
    disturbed: bool = False


def main(case: Case, rank: int, port: int, address: str, told: int, folder: Path, net: str | None) -> NoReturn:
    """Ends the process; what happened goes to `told`, a pipe, as lines of JSON."""
    os.setpgid(0, 0)
    if net is not None:
        enter = os.open(net, os.O_RDONLY)
        os.setns(enter, os.CLONE_NEWNET)
        os.close(enter)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if net is None else "eth0"
    code, text = OTHER, ""
    faulthandler.dump_traceback_later(STUCK_S)
    try:
        code, text = _run(case, rank, port, address, told, folder)
    except TransportError as error:
        code, text = WAIT_FAILED, str(error)
    except CorruptionError as error:
        code, text = FOUND, str(error)
    except RuntimeError as error:
        # A collective of torch, beside the ops: it has the same deadline, and words of its own.
        code, text = WAIT_FAILED, f"torch: {str(error).splitlines()[0]}"
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
    _tell(told, {"end": code, "text": text, "at": time.monotonic()})
    sys.stdout.flush()
    os._exit(code)


def _run(case: Case, rank: int, port: int, address: str, told: int, folder: Path) -> tuple[int, str]:
    torch.set_num_threads(1)
    draw = random.Random(case.seed)
    # As torchrun does, for half of the cases the store is held by a process that is no rank.
    own_store = case.seed % 2 == 0
    store = dist.TCPStore(address, port, case.size, is_master=own_store and rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.size, timeout=timedelta(seconds=60))
    group = dist.group.WORLD
    assert group is not None
    facts = {**{key: str(value) for key, value in asdict(case).items()}, "overlap.tensor.chunks_per_rank": "2"}
    if case.kind == "other config" and rank == case.victim:
        facts["overlap.tensor.chunks_per_rank"] = "3"
    _tell(told, {"fault": rank, "at": time.monotonic()} if case.kind == "other config" else {"ready": rank})
    found = compare(store_beside(group), rank, list(range(case.size)), "said", facts, 60)
    if found:
        return DIFFERS, found
    if case.load == GENERATION:
        return _generate(case, rank, group, told, folder, draw)
    run = SimpleNamespace(step=0, folder=folder)
    flight_recorder = FlightRecorder(rank, run, facts)
    flight_recorder.heartbeat = Heartbeat(store_beside(group), rank, case.deadline_s, flight_recorder.doing)
    corrupts = case.kind == "corruption"
    every = draw.randint(1, 7) if corrupts and rank == case.victim else 0
    transport: Any = (
        CorruptTransport(group, every=0, timeout_s=case.deadline_s)
        if corrupts
        else GlooTransport(group, TransportOptions(timeout_s=case.deadline_s, flight_recorder=flight_recorder))
    )
    work = Work(case.load, transport, group, check=corrupts)

    def inject() -> None:
        if corrupts:
            transport._every = every
        _inject(case, draw, told)

    def step(number: int) -> bool:
        run.step = number
        return work.step(number)

    wrong = _run_steps(case, rank, draw.randint(2, 6), inject, step)
    if wrong is not None:
        return WRONG, f"step {wrong}"
    dist.barrier(group)
    flight_recorder.close()
    transport.close()
    return DONE, ""


def _generate(
    case: Case, rank: int, group: dist.ProcessGroup, told: int, folder: Path, draw: random.Random
) -> tuple[int, str]:
    from scripts.trust.generation import NEW_TOKENS, Generation

    generation = Generation(group, ("static", "dynamic")[case.seed // 2 % 2], case.deadline_s, folder)
    inject = partial(generation.inject, draw.randrange(NEW_TOKENS), partial(_inject, case, draw, told))
    wrong = _run_steps(case, rank, draw.randint(2, 4), inject, generation.step)
    if wrong is not None:
        return WRONG, f"tokens of call {wrong}"
    dist.barrier(group)
    generation.close()
    return DONE, ""


def _run_steps(
    case: Case, rank: int, after: int, inject: Callable[[], None], step: Callable[[int], bool]
) -> int | None:
    """The number of the first step with a wrong result; None: the run went on after the fault in step `after`."""
    number, until = 0, after + (CALM_STEPS if case.kind in CALM else SLOW_STEPS if case.kind == SLOW else 1 << 40)
    while number < until:
        number += 1
        if number == after and rank == case.victim:
            inject()
        if not step(number):
            return number
        if os.getppid() == 1:
            raise SystemExit("the parent process of this case has ended")
    return None


CALM = ("stopped for a while", "late within the deadline", "clock jump")
"""Faults that a run survives."""
SLOW, SLOW_STEPS = "link at 1 %", 2
"""A link on which every single wait may come to its end in time; then the run goes on, for many seconds a step."""
_SLOWED_S = 1.0


def _inject(case: Case, draw: random.Random, told: int) -> None:
    moment = draw.random() * 0.05
    _tell(told, {"fault": case.victim, "at": time.monotonic()})
    numbers = {"SIGKILL": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP, "full disk": signal.SIGKILL}
    numbers["stopped for a while"] = signal.SIGSTOP
    if case.kind in numbers:
        number = numbers[case.kind]
        threading.Timer(moment, lambda: os.kill(os.getpid(), number)).start()
    elif case.kind == "late within the deadline":
        time.sleep(0.4 * case.deadline_s)
    elif case.kind == SLOW:
        time.sleep(_SLOWED_S)  # the link is slow before the step goes on
    elif case.kind == "late beyond the deadline":
        time.sleep(3 * case.deadline_s)
    elif case.kind == "clock jump":
        ctypes.CDLL(None).set_clock_offset(draw.choice([-86400, -3600, 3600, 86400]))


def _tell(pipe: int, message: dict[str, Any]) -> None:
    os.write(pipe, json.dumps(message).encode() + b"\n")
