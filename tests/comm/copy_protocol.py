"""Records what the ranks of a `CopyTransport` enqueue, and searches all orders in which a device may run it.

Every rank has a computing queue, a queue of sends and a queue of receives. A queue runs its steps in order; queues run
concurrently. `Recording` records the steps of one rank: copies, steps on flags, waits for another queue, and the torch
operations of the computation. `explore` visits every state that the queues of all ranks can reach.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from megatron_overlap.comm.symmetric.backend import Copy, FlagStep, copies_of

Bytes = tuple[int, int]
Flag = int | tuple[int, int]
"""The address of a flag that is 0 or 1, or the address of a word and a value that it reaches."""


@dataclass
class Step:
    """One step of a queue.

    Attributes:
        reads, writes: bytes that the step uses while it runs.
        sets: flag that the step sets.
        clears: flag that the step waits for and clears.
        awaits: flag that the step waits for.
        follows: queue of the same rank, and the number of its steps that must be complete.
        action: computes the result of the step.
    """

    reads: list[Bytes] = field(default_factory=list)
    writes: list[Bytes] = field(default_factory=list)
    sets: Flag | None = None
    clears: Flag | None = None
    awaits: Flag | None = None
    follows: tuple[str, int] | None = None
    action: Callable[[], object] | None = None


class Steps(list[Step]):
    """The steps of a queue; `calls` gets those of all queues of the rank, in the order of the calls."""

    def __init__(self, calls: list[Step]) -> None:
        super().__init__()
        self._calls = calls

    def append(self, step: Step) -> None:
        super().append(step)
        self._calls.append(step)


@dataclass(frozen=True)
class RecordedQueue:
    """See `backend.Queue`."""

    name: str
    steps: list[Step] = field(default_factory=list)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        self.steps.append(Step([span(source)], [span(to)], action=lambda: to.copy_(source)))

    def prepare_copies(self, copies: Sequence[Copy], *, captured: bool = False) -> object:
        return copies

    def copy_all(self, prepared: Any, tensors: Sequence[torch.Tensor]) -> None:
        """One step, whose copies run in any order."""
        copies = list(copies_of(prepared, tensors))
        each = [Step([span(source)], [span(to)]) for to, source in copies]
        assert not any(conflict(one, other) for one, other in combinations(each, 2))
        written, read = ([span(tensor) for tensor in tensors] for tensors in zip(*copies, strict=True))
        self.steps.append(Step(read, written, action=lambda: [to.copy_(source) for to, source in copies]))

    def write(self, words: torch.Tensor, index: int, value: int) -> None:
        self.steps.append(Step(sets=(words.data_ptr() + 4 * index, value)))

    def wait(self, words: torch.Tensor, index: int, value: int) -> None:
        self.steps.append(Step(awaits=(words.data_ptr() + 4 * index, value)))

    def prepare(self, steps: Sequence[FlagStep], *, captured: bool = False) -> object:
        flags = [(words.data_ptr() + 4 * index, sets) for words, index, sets, _ in steps]
        return [(flag, None) if sets else (None, flag) for flag, sets in flags]

    def run(self, prepared: Any) -> None:
        for sets, clears in prepared:
            self.steps.append(Step(sets=sets, clears=clears))

    def mark(self) -> object:
        return self.name, len(self.steps)

    def after(self, mark: Any) -> None:
        self.steps.append(Step(follows=mark))


def span(tensor: torch.Tensor) -> Bytes:
    """First byte of a tensor, and the byte after its last."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size() * (tensor.numel() > 0)


class RecordedBackend:
    """`SymmetricBackend` of one rank. The first rank allocates those of all ranks in `arenas`, by name and size."""

    def __init__(
        self, rank: int, size: int, arenas: dict[tuple[str, int], list[torch.Tensor]], device: str = "cpu"
    ) -> None:
        self.rank, self.size, self.ranks, self._arenas = rank, size, range(size), arenas
        self.device = torch.device(device)
        self.calls: list[Step] = []
        self.captures = False
        self.queues: list[RecordedQueue] = []
        self.computing = self._queue("computing")

    def _queue(self, name: str) -> RecordedQueue:
        self.queues.append(RecordedQueue(f"rank {self.rank} {name}", Steps(self.calls)))
        return self.queues[-1]

    def one_hardware_queue(self) -> RecordedQueue:
        """All steps of this rank in the order of the calls: what `CUDA_DEVICE_MAX_CONNECTIONS=1` permits."""
        return RecordedQueue(f"rank {self.rank}", [replace(step, follows=None) for step in self.calls])

    def begin_capture(self) -> None:
        """Drop the steps so far: later ones are a CUDA graph."""
        self.captures = True
        for queue in self.queues:
            queue.steps.clear()
        self.calls.clear()

    def graph_in_one_queue(self, choose: Callable[[list[Step]], int]) -> RecordedQueue:
        """The steps as a CUDA graph with one hardware queue may run them: in an order of their dependencies.

        Args:
            choose: selects one of the steps that may come next.
        """
        done = dict.fromkeys((queue.name for queue in self.queues), 0)
        steps: list[Step] = []
        while len(steps) < len(self.calls):
            ready = []
            for queue in self.queues:
                if done[queue.name] < len(queue.steps):
                    step = queue.steps[done[queue.name]]
                    if step.follows is None or done[step.follows[0]] >= step.follows[1]:
                        ready.append((queue.name, step))
            name, step = ready[choose([step for _, step in ready])]
            done[name] += 1
            steps.append(replace(step, follows=None))
        return RecordedQueue(f"rank {self.rank}", steps)

    def unjoined(self) -> list[str]:
        """The queues with steps that the end of the computing queue does not follow: CUDA refuses such a graph."""
        reached, waiting = {self.computing.name: len(self.computing.steps)}, [self.computing]
        by_name = {queue.name: queue for queue in self.queues}
        for queue in waiting:  # the loop appends to this list
            for step in queue.steps[: reached[queue.name]]:
                if step.follows is not None and step.follows[1] > reached.get(step.follows[0], 0):
                    reached[step.follows[0]] = step.follows[1]
                    waiting.append(by_name[step.follows[0]])
        return [queue.name for queue in self.queues if reached.get(queue.name, 0) < len(queue.steps)]

    def map(self, num_bytes: int, name: str = "") -> list[torch.Tensor]:
        found = self._arenas.get((name, num_bytes))
        if found is None:
            with _disable_current_modes():  # the allocation is no step of the computing queue
                found = [torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(self.size)]
            self._arenas[name, num_bytes] = found
        return found

    def queue(self) -> RecordedQueue:
        return self._queue(f"copies {len(self.queues)}")

    def barrier(self) -> None:
        """Return: all ranks run in this process."""

    def all_gather_text(self, text: str) -> list[str]:
        return [text]

    def is_capturing(self) -> bool:
        return self.captures

    def close(self) -> None:
        """Keep the recorded steps."""


class Recording(TorchDispatchMode):
    """Appends the torch operations inside the context to the computing queue of a rank."""

    def __init__(self, queue: RecordedQueue) -> None:
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _returns_a_view(func):
            return result
        schema = func._schema
        named = {argument.name: argument for argument in schema.arguments}
        passed = [*zip(schema.arguments, args, strict=False), *((named[key], value) for key, value in kwargs.items())]
        read, written = [], []
        for argument, value in passed:
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            (written if _is_written(argument) else read).extend(map(span, tensors))
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        changes_input = bool(written)
        written.extend(map(span, outputs))

        def run() -> None:
            again = func(*args, **kwargs)
            if not changes_input:
                for output, value in zip(outputs, tree_leaves(again), strict=True):
                    output.copy_(value)

        self._queue.steps.append(Step(read, written, action=run))
        return result


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


@cache
def _returns_a_view(func: Any) -> bool:
    if func is torch.ops.aten.unsafe_split_with_sizes.default:  # its schema does not say that it aliases
        return True
    aliases = any(returned.alias_info is not None for returned in func._schema.returns)
    return aliases and not any(map(_is_written, func._schema.arguments))


class ProtocolError(AssertionError):
    """Two steps that may run at the same time use the same bytes, or no step can start."""


def conflict(a: Step, b: Step) -> bool:
    """Whether the result depends on the order of two steps."""

    def overlap(first: Sequence[Bytes], second: Sequence[Bytes]) -> bool:
        for p, q in first:
            for r, s in second:
                if p < s and r < q:
                    return True
        return False

    return overlap(a.writes, b.writes) or overlap(a.writes, b.reads) or overlap(a.reads, b.writes)


def dependent(a: Step, b: Step) -> bool:
    """Whether the order of two steps that can both run decides a result or a flag."""
    same_flag = a.sets is not None and a.sets == b.clears or b.sets is not None and b.sets == a.clears
    return same_flag or conflict(a, b)


def explore(queues: Sequence[RecordedQueue], *, reduced: bool = False) -> int:
    """Visits every reachable state, or with `reduced` enough of them, and returns their number.

    A state is the number of complete steps of each queue. Steps that can start in the same state can run at the same
    time. One queue clears a flag, so a step that can start stays able to, and each state is reached by all orders.

    `reduced` searches persistent sets (Godefroid). If the next step t of a queue can start and commutes with all steps
    that can run before it, the search runs t alone. These steps are those that run when the other queues advance as
    far as they can without t, because a step that can start stays able to. No error is lost. Let w be steps that lead
    from this state to a race, or to a flag that is set while it is set:

    - w contains t: t commutes with the steps before it, so w may begin with t.
    - w does not contain t: w and the steps of the error can run before t and so commute with it. The error also occurs
      after t and w.
    - t is a step of the error: in a race the other step can run before t and does not commute with it. A flag that t
      sets is already set in this state, and the search reports it here.

    All orders end in the same state, so one order finds a deadlock.

    Raises:
        ProtocolError: a race, a deadlock, or a flag that is set while it is set.
    """
    names = {queue.name: index for index, queue in enumerate(queues)}
    programs = [queue.steps for queue in queues]
    uses = flag_uses(programs)
    independent: set[tuple[int, int, int, int]] = set()
    before = [_counts(program) for program in programs]

    def is_set(flag: Flag, state: tuple[int, ...]) -> bool:
        setter, clearer = uses[flag].setter, uses[flag].clearer
        times_set = before[setter][state[setter]].get((flag, True), 0)
        return times_set > (before[clearer][state[clearer]].get((flag, False), 0) if clearer >= 0 else 0)

    def can_start(step: Step, state: tuple[int, ...]) -> bool:
        if step.follows is not None and state[names[step.follows[0]]] < step.follows[1]:
            return False
        return all(flag is None or is_set(flag, state) for flag in (step.clears, step.awaits))

    def before_step(q: int, state: tuple[int, ...]) -> Iterator[Step]:
        """The steps that can run before the next step of queue q."""
        done, moved = list(state), True
        while moved:
            moved = False
            for other, program in enumerate(programs):
                while other != q and done[other] < len(program) and can_start(program[done[other]], tuple(done)):
                    yield program[done[other]]
                    done[other] += 1
                    moved = True

    def persistent(state: tuple[int, ...], ready: list[int]) -> list[int]:
        for q in ready:
            step = programs[q][state[q]]
            if not any(dependent(step, other) for other in before_step(q, state)):
                return [q]
        return ready

    first = (0,) * len(programs)
    seen, stack = {first}, [first]
    while stack:
        state = stack.pop()
        ready = [q for q, done in enumerate(state) if done < len(programs[q]) and can_start(programs[q][done], state)]
        if not ready and any(done < len(program) for done, program in zip(state, programs, strict=True)):
            raise ProtocolError(f"deadlock: {dict(zip(names, state, strict=True))}")
        for number, q in enumerate(ready):
            flag = programs[q][state[q]].sets
            if flag is not None and is_set(flag, state):
                raise ProtocolError(f"lost: {queues[q].name} step {state[q]} sets a flag that is set")
            for other in ready[:number]:
                key = (other, state[other], q, state[q])
                if key not in independent and conflict(programs[other][state[other]], programs[q][state[q]]):
                    raise ProtocolError(f"race: {queues[other].name} step {key[1]} and {queues[q].name} step {key[3]}")
                independent.add(key)
        for q in persistent(state, ready) if reduced else ready:
            after = (*state[:q], state[q] + 1, *state[q + 1 :])
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return len(seen)


def _counts(program: Sequence[Step]) -> list[dict[tuple[Flag, bool], int]]:
    """How often each flag is set (True) and cleared (False) before each step, and at the end."""
    counts: list[dict[tuple[Flag, bool], int]] = [{}]
    for step in program:
        now = dict(counts[-1])
        for flag, sets in ((step.sets, True), (step.clears, False)):
            if flag is not None:
                now[flag, sets] = now.get((flag, sets), 0) + 1
        counts.append(now)
    return counts


@dataclass
class FlagUse:
    """The queue that sets a flag, the queue that clears it, -1 for none, and the positions of their steps."""

    setter: int = -1
    clearer: int = -1
    sets: list[int] = field(default_factory=list)
    clears: list[int] = field(default_factory=list)


def flag_uses(programs: Sequence[Sequence[Step]]) -> dict[Flag, FlagUse]:
    """The uses of all flags.

    Raises:
        ProtocolError: two queues set or clear one flag, or a flag is cleared more often than set.
    """
    uses: dict[Flag, FlagUse] = {}
    for q, program in enumerate(programs):
        for position, step in enumerate(program):
            if step.sets is not None:
                use = uses.setdefault(step.sets, FlagUse())
                use.setter = q if use.setter < 0 else use.setter
                use.sets.append(position)
                if use.setter != q:
                    raise ProtocolError(f"queues {use.setter} and {q} set one flag")
            if step.clears is not None:
                use = uses.setdefault(step.clears, FlagUse())
                use.clearer = q if use.clearer < 0 else use.clearer
                use.clears.append(position)
                if use.clearer != q:
                    raise ProtocolError(f"queues {use.clearer} and {q} clear one flag")
    awaited = {step.awaits for program in programs for step in program if step.awaits is not None}
    if any(len(use.clears) > len(use.sets) for use in uses.values()) or not awaited <= uses.keys():
        raise ProtocolError("deadlock: nothing sets a flag")
    return uses


def ordered(queues: Sequence[RecordedQueue]) -> None:
    """Proves for any number of ranks that no order of the queues has a race or a deadlock, or loses a flag.

    Every step gets a vector clock: the steps of each queue that are complete whenever it starts. Two steps may run at
    the same time where neither clock contains the other step. This is the search of `explore` without its states: each
    flag has one queue that sets it and one that clears it, so the order decides nothing else.

    Raises:
        ProtocolError: a race, a deadlock, or a flag that may be set while it is set.
    """
    names = {queue.name: index for index, queue in enumerate(queues)}
    programs = [queue.steps for queue in queues]
    uses = flag_uses(programs)
    clocks: list[list[list[int]]] = [[] for _ in programs]
    now = [[0] * len(programs) for _ in programs]
    num_cleared: dict[Flag, int] = {}

    def guarantee(step: Step) -> tuple[int, int] | None:
        """Queue and number of steps that are complete when the step starts."""
        if step.follows is not None:
            return names[step.follows[0]], step.follows[1]
        if step.awaits is not None:
            return uses[step.awaits].setter, uses[step.awaits].sets[0] + 1
        if step.clears is None:
            return None
        use = uses[step.clears]
        return use.setter, use.sets[num_cleared.get(step.clears, 0)] + 1

    progress = True
    while progress:
        progress = False
        for q, program in enumerate(programs):
            while len(clocks[q]) < len(program):
                step = program[len(clocks[q])]
                needed = guarantee(step)
                if needed is not None and needed[1]:
                    queue, count = needed
                    if len(clocks[queue]) < count:
                        break
                    before = clocks[queue][count - 1]
                    now[q] = [max(pair) for pair in zip(now[q], before, strict=True)]
                    now[q][queue] = max(now[q][queue], count)
                if step.clears is not None:
                    num_cleared[step.clears] = num_cleared.get(step.clears, 0) + 1
                clocks[q].append(list(now[q]))
                now[q][q] = len(clocks[q])
                progress = True
    if any(len(clock) < len(program) for clock, program in zip(clocks, programs, strict=True)):
        raise ProtocolError("deadlock")
    for use in uses.values():
        for number, position in enumerate(use.sets[1:]):
            cleared = number < len(use.clears) and clocks[use.setter][position][use.clearer] > use.clears[number]
            if not cleared:
                raise ProtocolError(f"lost: {queues[use.setter].name} step {position} may set a flag that is set")
    for a, i, b, j in _concurrent(programs, clocks):
        if conflict(programs[a][i], programs[b][j]):
            raise ProtocolError(f"race: {queues[a].name} step {i} and {queues[b].name} step {j}")


def _concurrent(
    programs: Sequence[Sequence[Step]], clocks: Sequence[Sequence[Sequence[int]]]
) -> Iterator[tuple[int, int, int, int]]:
    """Steps i of queue a and j of queue b that use memory and may run at the same time."""
    using = [[i for i, step in enumerate(program) if step.reads or step.writes] for program in programs]
    for b in range(len(programs)):
        for a in range(b):
            after_b = [clock[b] for clock in clocks[a]]  # never falls: the steps of a queue run in order
            for j in using[b]:
                first, end = clocks[b][j][a], bisect_right(after_b, j)
                for i in using[a][bisect_left(using[a], first) : bisect_left(using[a], end)]:
                    yield a, i, b, j


def repeated(queues: Sequence[RecordedQueue], times: int) -> list[RecordedQueue]:
    """The steps of a captured CUDA graph that is replayed.

    A replay starts when all queues of its rank have finished the last one. Here each queue starts when it has itself:
    a weaker order, which a proof covers too.
    """
    lengths = {queue.name: len(queue.steps) for queue in queues}
    again = []
    for queue in queues:
        steps = []
        for number in range(times):
            for step in queue.steps:
                after = step.follows and (step.follows[0], step.follows[1] + number * lengths[step.follows[0]])
                steps.append(replace(step, follows=after))
        again.append(RecordedQueue(queue.name, steps))
    return again


def play(queues: Sequence[RecordedQueue], choose: Callable[[int], int]) -> None:
    """Runs all steps; `choose(n)` selects one of n queues whose next step can start."""
    names = {queue.name: index for index, queue in enumerate(queues)}
    done, is_set = [0] * len(queues), set[Flag]()
    while any(count < len(queue.steps) for count, queue in zip(done, queues, strict=True)):
        ready = []
        for q, queue in enumerate(queues):
            if done[q] == len(queue.steps):
                continue
            step = queue.steps[done[q]]
            if step.follows is not None and done[names[step.follows[0]]] < step.follows[1]:
                continue
            if step.clears is None or step.clears in is_set:
                ready.append(q)
        q = ready[choose(len(ready))]
        step = queues[q].steps[done[q]]
        if step.action is not None:
            step.action()
        if step.sets is not None:
            is_set.add(step.sets)
        if step.clears is not None:
            is_set.remove(step.clears)
        done[q] += 1
