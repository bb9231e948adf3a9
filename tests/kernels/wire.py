"""Simulates the slowest permitted link between ranks, in lock-step with the kernels.

The test delivers a message after the receiver has read its unset flag, so the receiver has no other work left. It
records results that the receiver wrote before it received their input.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self

import torch

from megatron_overlap.schedules import Chunk
from megatron_overlap.schedules.tile_order import arrival_order
from tests.helpers.world import World
from tests.kernels import workers
from tests.kernels.heap import forget, unwritten
from tests.kernels.mutants import Edit
from tests.kernels.problem import Problem


@dataclass
class Message:
    """Data that sets one flag of `receiver`."""

    receiver: int
    flag: int
    sent: Callable[[], bool]
    deliver: Callable[[], None]
    too_early: Callable[[], bool]
    idle: Callable[[], bool] = lambda: False


@dataclass
class Findings:
    """Errors of all epochs; equal to `Findings()` if there is none."""

    early: list[str] = field(default_factory=list)
    idle: list[str] = field(default_factory=list)
    not_whole: list[str] = field(default_factory=list)
    gave_up: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class Wire(threading.Thread):
    """Delivers messages in a background thread while the context is open."""

    def __init__(self, problem: Problem, epoch: int, messages: list[Message]) -> None:
        super().__init__(daemon=True)
        self._problem, self._epoch, self._messages = problem, epoch, messages
        self._over = threading.Event()
        self._looks = problem.looks()
        self.early: list[str] = []
        self.idle: list[str] = []
        self.delivered = 0

    def run(self) -> None:
        while self._messages and not self._over.is_set():
            for message in list(self._messages):
                # Two reads: the first may precede the store of the last tile of the previous chunk.
                if self._looks[message.receiver, message.flag] >= 2 and message.sent():
                    if message.too_early():
                        self.early.append(f"epoch {self._epoch}: rank {message.receiver}, flag {message.flag}")
                    if message.idle():
                        self.idle.append(f"epoch {self._epoch}: rank {message.receiver} waits, own rows are not done")
                    message.deliver()
                    self._problem.heap.flags(message.receiver, self._epoch)[message.flag] = self._epoch
                    self._messages.remove(message)
                    self.delivered += 1
            time.sleep(0.0005)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()


def _start(problem: Problem, epoch: int) -> None:
    """Fill all buffers with NaN, and set the flags to the epoch of the operation before the last one."""
    problem.looks().zero_()
    for rank in range(problem.ranks):
        num_elements = problem.heap.layout.slot_bytes // problem.dtype.itemsize
        forget(problem.heap.half(rank, epoch, (num_elements,), problem.dtype))
        forget(problem.out(rank))
        problem.heap.flags(rank, epoch).fill_(epoch - 2)
        for owner in range(problem.ranks):
            forget(problem.staged_rows(rank, owner))
            problem.staged_flags(rank, owner).fill_(epoch - 2)


def _check(findings: Findings, name: str, got: torch.Tensor, exact: torch.Tensor, terms: torch.Tensor) -> None:
    """Check that `got` equals `exact` within two roundings to its dtype and the error of fp32 sums of `terms`."""
    # The interpreter truncates to bf16 where a GPU rounds: one unit in the last place each time.
    eps = torch.finfo(got.dtype).eps
    bound = 4 * eps * terms + 32 * torch.finfo(torch.float32).eps * terms
    error = (got.double() - exact).abs()
    if not bool((error <= bound).all()):
        findings.wrong.append(f"{name}: off by {float(error.nan_to_num(torch.inf).max())}")


def gathering(
    world: World,
    problem: Problem,
    edits: tuple[Edit, ...] = (),
    epochs: tuple[int, ...] = (1, 2, 3),
) -> Findings:
    """Run the all-gather kernel of all ranks with simulated messages."""
    findings = Findings()
    for epoch in epochs:
        _start(problem, epoch)
        whole = problem.gathered(epoch)
        messages = [
            _gather_message(problem, epoch, whole, rank, chunk)
            for rank in range(problem.ranks)
            for chunk in arrival_order(problem.layout, rank)
            if chunk.owner != rank and problem.layout.num_chunk_rows(chunk)
        ]
        count = len(messages)
        with Wire(problem, epoch, messages) as wire:
            answers = world.run(problem.ranks, workers.gather, problem, epoch, edits)
        findings.early += wire.early
        findings.idle += wire.idle
        findings.gave_up += [gave_up for gave_up in answers if gave_up]
        if wire.delivered < count:
            findings.early.append(f"epoch {epoch}: {count - wire.delivered} chunks were never waited for")
        for rank in range(problem.ranks):
            _, b, bias = (tensor.double() for tensor in problem.operands(rank, epoch))
            x = whole.double()
            exact, terms = x @ b, x.abs() @ b.abs()
            if problem.bias:
                exact, terms = exact + bias, terms + bias.abs()
            _check(findings, f"epoch {epoch} rank {rank}", problem.out(rank), exact, terms)
    return findings


def _gather_message(problem: Problem, epoch: int, whole: torch.Tensor, rank: int, chunk: Chunk) -> Message:
    rows = slice(*problem.layout.rows(chunk))
    gathered = problem.heap.half(rank, epoch, (problem.rows, problem.k), problem.dtype)
    out, own = problem.out(rank)[rows], problem.out(rank)[slice(*problem.layout.shard(rank))]

    def deliver() -> None:
        gathered[rows] = whole[rows]

    def idle() -> bool:
        # The interpreter runs programs one by one: the first one waits before the others start.
        return problem.programs == 1 and bool(unwritten(own).any())

    return Message(
        rank,
        chunk.owner * problem.parts + chunk.part,
        sent=lambda: True,
        deliver=deliver,
        too_early=lambda: not bool(unwritten(out).all()),
        idle=idle,
    )


def scattering(
    world: World, problem: Problem, edits: tuple[Edit, ...] = (), epochs: tuple[int, ...] = (1, 2, 3)
) -> Findings:
    """Run the reduce-scatter kernels of all ranks with simulated stores to the receive buffers of peers."""
    findings = Findings()
    for epoch in epochs:
        _start(problem, epoch)
        ranks = range(problem.ranks)
        messages = [
            _scatter_message(problem, epoch, source, owner, part)
            for owner in ranks
            for source in ranks
            for part in range(problem.parts)
            if problem.in_slot(owner, part).start < problem.in_slot(owner, part).stop
        ]
        count = len(messages)
        with Wire(problem, epoch, messages) as wire:
            answers = world.run(problem.ranks, workers.scatter, problem, epoch, edits)
        findings.early += wire.early
        if wire.delivered < count:
            findings.early.append(f"epoch {epoch}: {count - wire.delivered} chunks were never waited for")
        for rank, answer in enumerate(answers):
            findings.gave_up += [answer["gave_up"]] * bool(answer["gave_up"])
            findings.not_whole += [f"epoch {epoch}: rank {rank} to {to}" for to in answer["not_whole"]]
            if answer["counters"]:
                findings.wrong.append(f"epoch {epoch} rank {rank}: counters are left at {answer['counters']}")
            start, stop = problem.layout.shard(rank)
            operands = [problem.operands(source, epoch) for source in ranks]
            exact = sum(a[start:stop].double() @ b.double() for a, b, *_ in operands)
            terms = sum(a[start:stop].double().abs() @ b.double().abs() for a, b, *_ in operands)
            assert isinstance(exact, torch.Tensor)
            assert isinstance(terms, torch.Tensor)
            _check(findings, f"epoch {epoch} rank {rank}", problem.out(rank)[: stop - start], exact, terms)
            again = _sum_in_order(problem, rank, epoch)
            if not torch.equal(problem.out(rank)[: stop - start], again):
                findings.wrong.append(f"epoch {epoch} rank {rank}: not the sum in the order of the ranks")
    return findings


def _sum_in_order(problem: Problem, rank: int, epoch: int) -> torch.Tensor:
    """Return the sum of the receive buffer in rank order."""
    shape = (problem.ranks, problem.slot_rows, problem.n)
    recv_buffer = problem.heap.half(rank, epoch, shape, problem.dtype)[:, : problem.layout.shard_rows(rank)]
    total = torch.zeros(recv_buffer.shape[1:])
    for term in recv_buffer:
        total += term.float()
    return workers.converted(total, problem.dtype)


def _scatter_message(problem: Problem, epoch: int, source: int, owner: int, part: int) -> Message:
    shape = (problem.ranks, problem.slot_rows, problem.n)
    recv_buffer = problem.heap.half(owner, epoch, shape, problem.dtype)
    rows = problem.in_slot(owner, part)
    flag = source * problem.parts + part
    stored, there = problem.staged_rows(source, owner), problem.staged_flags(source, owner)
    out = problem.out(owner)[rows]

    def deliver() -> None:
        recv_buffer[source, rows] = stored[source, rows]

    return Message(
        owner,
        flag,
        sent=lambda: int(there[flag]) == epoch,
        deliver=deliver,
        too_early=lambda: not bool(unwritten(out).all()),
    )
