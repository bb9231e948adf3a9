"""Every order in which the queues of all ranks may run the copies of `CopyTransport` is free of races and deadlocks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch

from megatron_overlap.comm.symmetric import copies
from megatron_overlap.comm.symmetric.copies import CopyTransport
from megatron_overlap.comm.symmetric.heap import MAX_FLAGS, HeapPool
from megatron_overlap.comm.transport import Exchange, Transfer, TransportError
from megatron_overlap.ops import LinearPlan, all_gather_linear, linear_all_reduce, linear_reduce_scatter
from megatron_overlap.ops.tensor_parallel.pipelined import PipelinedAllGather, _GatheredRows
from megatron_overlap.ops.tensor_parallel.pipelined_reduce_scatter import _ScatteredRows
from megatron_overlap.schedules import all_gather_plan, reduce_scatter_plan
from megatron_overlap.schedules.plan import Chunk, Message, Split
from scripts.mutants import ROOT, load
from tests.comm.copy_protocol import (
    ProtocolError,
    RecordedBackend,
    RecordedQueue,
    Recording,
    Step,
    explore,
    flag_uses,
    ordered,
    play,
    repeated,
)


@dataclass
class Recorded:
    """What all ranks enqueue, their results, and the results of the plain program, which may be computed again.

    Attributes:
        set_input: writes other numbers to the input of all ranks.
    """

    queues: list[RecordedQueue]
    hardware_queues: list[RecordedQueue]
    backends: list[RecordedBackend]
    results: list[torch.Tensor]
    expected: Callable[[], list[torch.Tensor]]
    set_input: Callable[[int], None] = lambda seed: None

    def is_right(self) -> bool:
        """Whether all results have the bits of the plain program."""
        return all(torch.equal(*pair) for pair in zip(self.results, self.expected(), strict=True))


OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ag_gemm": all_gather_linear,
    "gemm_rs": linear_reduce_scatter,
    "gemm_ar": linear_all_reduce,
}


def record(
    size: int,
    ops: list[str],
    *,
    rows: int = 2,
    pattern: str = "direct",
    chunks: int = 1,
    device: str = "cpu",
    split: Split | None = None,
    transport: type[CopyTransport] = CopyTransport,
    captured: bool = False,
) -> Recorded:
    """Records operations on integers, one after another, with buffers of the pool and of earlier operations.

    `captured` records a CUDA graph, after calls that allocate the buffers.
    """
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, size, arenas, device) for rank in range(size)]
    transports = [transport(backend) for backend in backends]
    plan = LinearPlan(pattern=pattern, chunks_per_rank=chunks, split=split)
    x = torch.arange(rows * size * 64, dtype=torch.float32).remainder(7).view(-1, 64)
    weights = [torch.full((64, 64), rank + 1.0).tril() for rank in range(size)]
    found, owned = [], [x[rank * rows : (rank + 1) * rows].clone() for rank in range(size)]
    for rank, each in enumerate(transports):
        if captured:
            for op in set(ops):
                OPERATIONS[op](owned[rank] if op == "ag_gemm" else x, weights[rank], group=each, plan=plan)
            backends[rank].begin_capture()
        with torch.no_grad(), Recording(backends[rank].computing):
            for op in ops:
                operand = owned[rank] if op == "ag_gemm" else x + 0.0
                found.append(OPERATIONS[op](operand, weights[rank], group=each, plan=plan))

    def expected() -> list[torch.Tensor]:
        total = torch.stack([x @ weight.T for weight in weights]).sum(0)
        plain = []
        for rank in range(size):
            of_rank = {"ag_gemm": x @ weights[rank].T, "gemm_ar": total, "gemm_rs": total[rank * rows :][:rows]}
            plain += [of_rank[op] for op in ops]
        return plain

    def set_input(seed: int) -> None:
        x.copy_(torch.randint(7, x.shape, generator=torch.Generator().manual_seed(seed)))
        for rank, own in enumerate(owned):
            own.copy_(x[rank * rows : (rank + 1) * rows])

    return _recorded(backends, found, expected, set_input)


def _recorded(backends: list[RecordedBackend], results: list[torch.Tensor], *functions: Any) -> Recorded:
    queues = [queue for backend in backends for queue in backend.queues]
    return Recorded(queues, [backend.one_hardware_queue() for backend in backends], backends, results, *functions)


FOUR = ["ag_gemm", "gemm_rs", "ag_gemm", "gemm_rs"]
ALL_REDUCES = ["gemm_ar", "ag_gemm", "gemm_ar", "gemm_rs"]


@pytest.mark.parametrize("chunks", [1, 2])
def test_every_state_of_two_ranks(chunks: int) -> None:
    recorded = record(2, FOUR, chunks=chunks)
    assert explore(recorded.queues) > 900
    ordered(recorded.queues)


@pytest.mark.parametrize(
    ("pattern", "times"),
    [
        pytest.param("direct", 1, marks=pytest.mark.long),
        pytest.param("direct", 2, marks=pytest.mark.long),
        ("ring", 1),
    ],
)
def test_every_state_of_three_ranks(pattern: str, times: int) -> None:
    """Four operations, without reduction; twice is the replay of a graph.

    400,269, 817,427 and 56,269 states. Daily, persistent sets represent the direct pattern.
    """
    queues = record(3, FOUR, rows=1, pattern=pattern).queues
    assert explore(repeated(queues, times)) > 50_000


@pytest.mark.parametrize("pattern", ["direct", "ring"])
@pytest.mark.parametrize("times", [1, 2])
def test_every_order_of_three_ranks_by_persistent_sets(times: int, pattern: str) -> None:
    """Four operations; twice is the replay of a graph. Without an error one order represents all: 166 to 361 states."""
    queues = repeated(record(3, FOUR, rows=1, pattern=pattern).queues, times)
    assert explore(queues, reduced=True) == 1 + sum(len(queue.steps) for queue in queues)


def verdict(search: Callable[[], object]) -> str:
    """The kind of error that a search finds; empty if it finds none."""
    try:
        search()
    except ProtocolError as error:
        return str(error).partition(":")[0]
    return ""


MUTANTS = [each for each in load() if "symmetric/cop" in each.file and "tests/comm/test_copy_protocol.py" in each.tests]


def test_the_reduction_finds_the_mutants_that_the_whole_search_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mutant of `CopyTransport` and of its steps, on two ranks."""
    found = set[tuple[str, int]]()
    for mutant in MUTANTS:
        module = ModuleType("mutant")
        source = (ROOT / mutant.file).read_text(encoding="utf-8")
        mutated = compile(source.replace(mutant.before, mutant.after), mutant.file, "exec", dont_inherit=True)
        exec(mutated, module.__dict__)
        monkeypatch.setattr(copies, "State", module.State)
        for pattern, chunks in (("direct", 2), ("ring", 1)):
            try:
                recorded = record(
                    2, FOUR, chunks=chunks, pattern=pattern, transport=getattr(module, "CopyTransport", CopyTransport)
                )
            except (TransportError, AssertionError):
                continue
            whole = verdict(lambda recorded=recorded: explore(recorded.queues))
            reduced = verdict(lambda recorded=recorded: explore(recorded.queues, reduced=True))
            assert bool(whole) == bool(reduced), (mutant, pattern, whole, reduced)
            found.add((whole, mutant.number))
    assert len({number for kind, number in found if kind}) >= 12
    assert {kind for kind, _ in found} == {"", "race", "deadlock", "lost"}


def random_queues(draw: random.Random) -> list[RecordedQueue]:
    """Three queues with up to five steps: bytes, flags with one queue that sets them and one that clears, and marks."""
    names = ["a", "b", "c"]
    flags = [(flag, *draw.sample(names, 2)) for flag in range(3)]
    queues = [RecordedQueue(name) for name in names]
    for queue in queues:
        for _ in range(draw.randrange(1, 6)):
            kind = draw.choice(("bytes", "bytes", "flag", "flag", "mark"))
            start = draw.randrange(4)
            step = Step(reads=[(start, start + 1)])
            if kind == "bytes" and draw.random() < 0.4:
                step = Step(writes=[(start, start + 1)])
            if kind == "mark":
                step = Step(follows=(draw.choice([name for name in names if name != queue.name]), draw.randrange(3)))
            own = [(flag, queue.name == setter) for flag, setter, clearer in flags if queue.name in (setter, clearer)]
            if kind == "flag" and own:
                flag, sets = draw.choice(own)
                step = Step(sets=flag) if sets else Step(clears=flag)
            queue.steps.append(step)
    return queues


def test_the_reduction_and_the_clocks_agree_with_the_whole_search_on_random_programs() -> None:
    draw, found = random.Random(1), Counter[str]()
    for _ in range(4000):
        queues = random_queues(draw)
        lengths = {queue.name: len(queue.steps) for queue in queues}
        if any(step.follows and step.follows[1] > lengths[step.follows[0]] for q in queues for step in q.steps):
            continue
        whole = verdict(lambda queues=queues: explore(queues))
        assert bool(verdict(lambda queues=queues: explore(queues, reduced=True))) == bool(whole), queues
        assert bool(verdict(lambda queues=queues: ordered(queues))) == bool(whole), queues
        found[whole] += 1
    assert min(found[kind] for kind in ("", "race", "deadlock", "lost")) > 50, found


@pytest.mark.parametrize(
    ("size", "pattern", "rows"),
    [(2, "ring", 2), (3, "direct", 3), (3, "ring", 2), (4, "direct", 2), (4, "ring", 2), (8, "direct", 2)],
)
def test_every_order_of_more_ranks(size: int, pattern: str, rows: int) -> None:
    ordered(record(size, FOUR, pattern=pattern, rows=rows).queues)


@pytest.mark.parametrize(("size", "pattern"), [(2, "direct"), (3, "ring"), (4, "direct"), (8, "direct")])
def test_one_hardware_queue_has_no_deadlock(size: int, pattern: str) -> None:
    """All queues of a rank run as one, in the order of the calls."""
    ops = [*FOUR, "gemm_ar", "ag_gemm", "gemm_ar"] if pattern == "direct" else FOUR
    recorded = record(size, ops, pattern=pattern, device="cuda")
    ordered(recorded.hardware_queues)


@pytest.mark.parametrize("size", [4, 8])
def test_every_order_of_calls_of_several_messages(size: int) -> None:
    """Slices share GEMMs, and their copies are one call."""
    recorded = record(size, [*FOUR, "gemm_ar", "ag_gemm"], device="cuda", split="edge")
    copies = [step for queue in recorded.queues for step in queue.steps if step.writes and "copies" in queue.name]
    assert {len(step.writes) for step in copies} >= {1, size // 2, size - 1}
    steps = [step for queue in recorded.queues for step in queue.steps]
    # Every flag that a rank sets, another one waits for.
    assert {step.sets for step in steps} == {step.clears for step in steps}
    ordered(recorded.queues)
    ordered(recorded.hardware_queues)


def test_a_call_waits_for_the_work_of_all_its_messages() -> None:
    """Also where a wait sends the messages before it at once."""
    backend = RecordedBackend(0, 3, {}, "cuda")
    transport, rows = CopyTransport(backend), torch.zeros(4, 64)
    received = transport.buffer_pool.take("received", (4, 64), rows, symmetric=True).split(2)
    chunk = Chunk(0, 0)
    work = transport.begin(
        [
            Transfer(Message(chunk, to, chunk, to, after_work=to, call=0), part, into, lands=into)
            for to, part, into in zip((1, 2), rows.split(2), received, strict=True)
        ],
        "two messages",
    )
    work.mark_ready(1)
    work.wait(0)
    sent: Any = transport.queues.sending
    assert not any(step.writes for step in sent.steps)
    backend.computing.write(rows, 0, 1)
    end = backend.computing.mark()
    work.mark_ready(2)
    assert [len(step.writes) for step in sent.steps if step.writes] == [2]
    assert [step.follows for step in sent.steps if step.follows] == [end]


def test_a_wait_for_several_messages_sends_before() -> None:
    """Also the messages that the plan places behind work that is not enqueued."""
    arenas: dict[tuple[str, int], list[torch.Tensor]] = {}
    backends = [RecordedBackend(rank, 3, arenas, "cuda") for rank in range(3)]
    transports = [CopyTransport(backend) for backend in backends]
    for rank, transport in enumerate(transports):
        plan, shard = all_gather_plan(3, rank), torch.zeros(2, 64)
        full = transport.buffer_pool.take("gather", (6, 64), shard, symmetric=True)
        gather = PipelinedAllGather(transport, plan, (shard,), plan.layout(6), (full,), "gather", repeats=True)
        gather._p2p_work.wait(*range(len(plan.messages)))
        gather.finish()
    ordered([backend.one_hardware_queue() for backend in backends])


def test_what_a_call_enqueues() -> None:
    """On a device, for R ranks: R - 1 copies of a slice, and the later calls prepare nothing and keep no own rows."""
    size, rows = 4, 2
    backend = RecordedBackend(0, size, {}, "cuda")
    transport = CopyTransport(backend)
    weight, shard, whole = torch.ones(64, 64), torch.ones(rows, 64), torch.ones(rows * size, 64)
    plan = LinearPlan(pattern="direct")
    for operation, x, marks in ((all_gather_linear, shard, 3), (linear_reduce_scatter, whole, size + 1)):
        counted = []
        for _ in range(3):
            backend.calls.clear()
            with torch.no_grad():
                operation(x.clone(), weight, group=transport, plan=plan)
            copied = [step.writes[0] for step in backend.calls if step.writes]
            steps = [[step for step in backend.calls if getattr(step, kind)] for kind in ("sets", "clears", "follows")]
            counted.append((sum(stop - start for start, stop in copied), *map(len, (copied, *steps))))
        others = size - 1
        num_bytes = others * rows * 64 * 4
        assert counted == [(num_bytes, others, 2 * others, 2 * others, marks)] * 3
        *_, (_, rows_of) = transport.buffer_pool.derived.values()
        (state,) = rows_of.prepared.values()
        assert isinstance(rows_of, _GatheredRows) != any(message.copies for message in state.messages.all)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_the_queue_of_sends_runs(device: str) -> None:
    """For each message the wait (w) for a free buffer, the copy (c) and the flag (f), if several are one call too.

    A reduce-scatter waits for all buffers while its first GEMM runs.
    """
    backend = RecordedBackend(0, 4, {}, device)
    transport, weight, plan = CopyTransport(backend), torch.ones(64, 64), LinearPlan(pattern="direct")
    queue: Any = transport.queues.sending
    kinds, wanted = {"w": "clears", "c": "writes", "f": "sets"}, {"ag_gemm": "wcf" * 3, "gemm_rs": "www" + "cf" * 3}
    for op, expected in wanted.items():
        before = len(queue.steps)
        with torch.no_grad():
            OPERATIONS[op](torch.ones(8, 64), weight, group=transport, plan=plan)
        found = "".join(each for step in queue.steps[before:] for each in kinds if getattr(step, kinds[each]))
        assert found == expected


@pytest.mark.parametrize("seed", range(10))
def test_calls_in_another_order_enqueue_steps_of_their_own(seed: int) -> None:
    """A transport that planned other orders enqueues the same steps as a new one, also for what is not repeated."""
    draw, arenas = random.Random(seed), dict[tuple[str, int], list[torch.Tensor]]()
    plan, partial = reduce_scatter_plan(3, 0, chunks_per_rank=2), torch.zeros(12, 4)
    num_work = len(plan.work)

    def new() -> tuple[CopyTransport, RecordedBackend, _ScatteredRows]:
        backend = RecordedBackend(0, 3, arenas, "cuda")
        transport = CopyTransport(backend)
        terms = transport.buffer_pool.take("received", (8, 4), partial, symmetric=True)
        return transport, backend, _ScatteredRows(plan, plan.layout(12), partial, terms, hidden=True)

    def enqueued(calls: list[tuple[str, tuple[int, ...]]], opened: Any, *, repeats: bool = True) -> list[Any]:
        transport, backend, rows = opened
        begin = {queue.name: len(queue.steps) for queue in backend.queues}
        work = transport.begin(Exchange(rows) if repeats else rows.build(None), "op")
        for name, arguments in calls:
            getattr(work, name)(*arguments)
        return [
            (queue.name, step.sets, step.clears, step.writes, step.follows and step.follows[1] - begin[step.follows[0]])
            for queue in backend.queues
            for step in queue.steps[begin[queue.name] :]
        ]

    opened = new()
    for _ in range(12):
        calls, done, left = list[tuple[str, tuple[int, ...]]](), 0, list(range(len(plan.messages)))
        while done < num_work:
            if left and draw.random() < 0.2:
                calls.append(("wait", (left.pop(draw.randrange(len(left))),)))
            else:
                done = min(num_work, done + draw.randint(1, 2))
                calls.append(("mark_ready", (done,)))
        calls += [("wait_all", ())] * 2
        for repeats in (True, True, False):
            assert enqueued(calls, opened, repeats=repeats) == enqueued(calls, new())


def test_a_message_between_symmetric_buffers_is_one_copy() -> None:
    recorded = record(3, ["ag_gemm", "gemm_rs"])
    copies = [sum(bool(step.writes) for step in queue.steps) for queue in recorded.queues if "copies" in queue.name]
    sending, receiving = 2 * 2, 0
    assert copies == [sending, receiving] * 3


@pytest.mark.parametrize("size", [2, 3])
def test_every_order_of_all_reduces(size: int) -> None:
    ordered(record(size, ["gemm_ar", "ag_gemm", "gemm_ar", "gemm_ar"], rows=1).queues)


def test_every_order_of_a_replayed_all_reduce() -> None:
    queues = record(2, ["gemm_ar", "gemm_rs"], rows=1).queues
    assert explore(repeated(queues, 2)) > 1000


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_results_in_a_random_order(size: int, chunks: int, device: str) -> None:
    recorded = record(size, [*FOUR, "gemm_ar"], rows=chunks, chunks=chunks, device=device)
    for result in recorded.results:
        result.fill_(float("nan"))
    play(recorded.queues, random.Random(chunks).randrange)
    assert recorded.is_right()


@pytest.mark.parametrize(("pattern", "ops"), [("direct", FOUR), ("ring", FOUR), ("direct", ALL_REDUCES)])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_order_of_replays(size: int, pattern: str, ops: list[str]) -> None:
    """A replayed CUDA graph enqueues the same steps again: each operation leaves all flags as it found them."""
    queues = record(size, ops, rows=1, pattern=pattern).queues
    if size == 2 and ops == FOUR:
        assert explore(repeated(queues, 2)) > 1000
    ordered(repeated(queues, 3))
    for use in flag_uses([queue.steps for queue in queues]).values():
        assert len(use.sets) == len(use.clears)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("size", [2, 4])
def test_results_of_a_hundred_replays(size: int, chunks: int) -> None:
    recorded = record(size, [*FOUR, "gemm_ar"], rows=chunks, chunks=chunks)
    order = random.Random(size)
    for step in range(100):
        recorded.set_input(step)
        play(recorded.queues, order.randrange)
        assert recorded.is_right()


CAPTURED = pytest.mark.parametrize(
    ("size", "pattern", "chunks", "ops"),
    [
        (2, "direct", 2, FOUR),
        (3, "ring", 1, FOUR),
        (4, "direct", 1, FOUR),
        (4, "ring", 2, FOUR),
        (3, "direct", 1, ALL_REDUCES),
    ],
)


@CAPTURED
def test_a_captured_graph_joins_all_queues(size: int, pattern: str, chunks: int, ops: list[str]) -> None:
    """CUDA refuses a graph with work that does not end in the stream of the capture."""
    recorded = record(size, ops, rows=chunks, pattern=pattern, chunks=chunks, captured=True)
    assert [backend.unjoined() for backend in recorded.backends] == [[]] * size


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@CAPTURED
def test_a_captured_graph_on_one_hardware_queue(
    size: int, pattern: str, chunks: int, ops: list[str], device: str
) -> None:
    """CUDA may run the steps of a graph in any order that keeps their dependencies."""
    settings = {"rows": chunks, "pattern": pattern, "chunks": chunks, "device": device}
    recorded = record(size, ops, captured=True, **settings)
    ordered(recorded.queues)

    def first(wanted: Callable[[Step], object]) -> Callable[[list[Step]], int]:
        return lambda steps: max(range(len(steps)), key=lambda index: bool(wanted(steps[index])))

    orders = [first(lambda step: step.clears), first(lambda step: not step.sets and not step.writes)]
    draw = random.Random(size)
    orders += [lambda steps: draw.randrange(len(steps))] * 4
    for order in orders:
        ordered(repeated([backend.graph_in_one_queue(order) for backend in recorded.backends], 2))


def test_results_of_captured_replays() -> None:
    recorded = record(3, [*FOUR, "gemm_ar"], rows=1, captured=True)
    for step in range(10):
        recorded.set_input(step)
        play(recorded.queues, random.Random(step).randrange)
        assert recorded.is_right()


def test_calls_inside_and_outside_a_graph_share_no_gather() -> None:
    """Calls before a capture share a gather. A capture gathers nothing, and a replay overwrites the rows unseen."""
    backend = RecordedBackend(0, 2, {})
    transport, x, weight, counts = CopyTransport(backend), torch.ones(4, 64), torch.ones(64, 64), [0]
    with torch.no_grad():
        for captures in (False, False, True, True, False):
            backend.captures = captures
            all_gather_linear(x, weight, group=transport, plan=LinearPlan(pattern="direct"))
            counts.append(sum(bool(step.writes) for step in transport.queues.sending.steps))  # type: ignore[attr-defined]
    assert [after - before for before, after in pairwise(counts)] == [1, 0, 1, 1, 1]


def test_a_captured_operation_marks_the_buffers() -> None:
    """Also one that reuses no earlier gather."""
    backend = RecordedBackend(0, 2, {})
    transport, x, weight = CopyTransport(backend), torch.ones(4, 64), torch.ones(64, 64)
    with torch.no_grad():
        linear_reduce_scatter(x, weight, group=transport)
        backend.begin_capture()
        linear_reduce_scatter(x, weight, group=transport)
    assert isinstance(transport.buffer_pool, HeapPool)
    assert transport.buffer_pool.captured


def test_new_buffers_are_not_captured() -> None:
    x, weight, backend = torch.ones(2, 64), torch.ones(64, 64), RecordedBackend(0, 2, {})
    transport = CopyTransport(backend)
    backend.begin_capture()
    error = "forward and backward with the same shapes before the capture"
    with torch.no_grad(), pytest.raises(TransportError, match=error):
        all_gather_linear(x, weight, group=transport)


def test_messages_land_in_symmetric_buffers() -> None:
    """Any other message is an error that names it, before the ranks wait for each other."""
    transport, chunk, content = CopyTransport(RecordedBackend(0, 2, {})), Chunk(0, 0), torch.zeros(4)
    message = Message(chunk, 1, chunk, 1)
    buffer = transport.buffer_pool.take("received", (4,), content, symmetric=True)
    ordinary = [Transfer(message, content, buffer), Transfer(message, content, buffer, lands=torch.zeros(4))]
    second_tensor = Transfer(message, content, buffer, (content,), (buffer,), lands=buffer)
    for transfer in (*ordinary, second_tensor):
        with pytest.raises(TransportError, match=r"^one: cannot send message 0 .* to rank 1: it lands in no symmetric"):
            transport.begin([transfer], "one")
    empty = torch.empty(0)
    transport.begin([Transfer(message, empty, empty)], "nothing").wait_all()


def test_an_operation_has_a_limited_number_of_messages() -> None:
    transport, chunk, content = CopyTransport(RecordedBackend(0, 2, {})), Chunk(0, 0), torch.zeros(1)
    buffer = transport.buffer_pool.take("received", (1,), content, symmetric=True)
    transfers = [Transfer(Message(chunk, 1, chunk, 1), content, buffer, lands=buffer)] * (MAX_FLAGS + 1)
    transport.begin(transfers[1:], "many")
    with pytest.raises(
        TransportError, match=f"^many: more than {MAX_FLAGS} messages between two ranks; use fewer chunks"
    ):
        transport.begin(transfers, "many")
