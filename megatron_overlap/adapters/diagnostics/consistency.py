"""What every feature needs to be trusted: all ranks run the same, and a wait that fails says everything that is known.

Seams: ``parallel_state.initialize_model_parallel``, after which all ranks have to say what they run, and
``training.train_step``, which knows the number of the step. Both wrappers are undone by ``Session.disable``.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_overlap.comm import Transport, transport_of
from megatron_overlap.comm.transport import store_beside
from megatron_overlap.config.errors import Problem
from megatron_overlap.diagnostics.consistency import compare
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.diagnostics.heartbeat import Heartbeat
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.session import Session


class ConfigMismatchError(ValueError):
    """The ranks do not run the same; names what differs, the ranks and their values."""


class UnfitError(ValueError):
    """The config fits the shapes of no rank; names the key, its value and the remedy."""


class Trust:
    """What has been agreed on in a session, and the flight_recorder over its messages."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._world: dist.ProcessGroup | None = None
        """Whose ranks have all agreed."""
        self._following = False
        self._groups: set[dist.ProcessGroup] = set()
        self._flight_recorder: FlightRecorder | None = None

    def watch(self) -> FlightRecorder:
        """Of this rank; made by the first call, when torch.distributed is there."""
        if self._flight_recorder is None:
            session = self._session
            self._flight_recorder = FlightRecorder(dist.get_rank(), session.folder, session.consistency_facts())
            self._flight_recorder.step = session.step
            session.add_close(self._flight_recorder.close)
        return self._flight_recorder

    def changed(self) -> None:
        """The session's step or folder has."""
        if self._flight_recorder is not None:
            self._flight_recorder.step, self._flight_recorder.folder = self._session.step, self._session.folder

    def post_mortem(self, error: BaseException) -> str | None:
        """Writes what this rank was doing when `error` ended it; where it is."""
        return None if self._flight_recorder is None else self._flight_recorder.post_mortem(error)

    def agree_all(self) -> None:
        """All ranks of the job compare what they run; collective.

        Raises:
            ConfigMismatchError: they do not run the same, or one of them said nothing until the deadline.
            UnfitError: the config fits no rank.
        """
        world = dist.group.WORLD
        assert world is not None
        if self._world not in (None, world):
            self._forget()
        self._agree(world)
        for problem in unfit(self._session):
            value = "null" if problem.value is None else problem.value
            raise UnfitError(f"overlap config: {problem.key}: {value}: {problem.remedy}")
        self._world = world
        self._begin_heartbeat(world)
        self._follow_steps()

    def agree(self, group: dist.ProcessGroup) -> None:
        """The same among the ranks of a group, unless all have agreed: for programs that make groups of their own."""
        if self._world is not None or group in self._groups:
            return
        self._agree(group)
        self._groups.add(group)

    def _agree(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        deadline_s = deadline_of(self._session, group)
        found = compare(
            store_beside(group), dist.get_rank(group), ranks, "said", self._session.consistency_facts(), deadline_s
        )
        if found:
            raise ConfigMismatchError(f"the ranks do not run the same: {found}: start all of them alike")

    def _forget(self) -> None:
        """The job's groups were destroyed and made anew, as by an in-process restart: lets all of the old ones go.

        What was on its way in them is not waited for: the ranks that it came from may be gone.
        """
        session = self._session
        for adapter in (session.linear, session.data_parallel, session.ulysses, session.varlen):
            if adapter is not None:
                adapter.drop()
        session.varlen = None
        if self._flight_recorder is not None:
            self._flight_recorder.close()
            self._flight_recorder = None
        self._groups.clear()

    def _begin_heartbeat(self, world: dist.ProcessGroup) -> None:
        flight_recorder = self.watch()
        if flight_recorder.heartbeat is None and dist.get_world_size() > 1:
            flight_recorder.heartbeat = Heartbeat(
                store_beside(world), dist.get_rank(), deadline_of(self._session, world), flight_recorder.doing
            )

    def _follow_steps(self) -> None:
        """Counts the steps of Megatron's training loop, if this process runs it."""
        training = sys.modules.get("megatron.training.training")
        if training is None or self._following:
            return
        self._following = True
        original, session = training.train_step, self._session

        @functools.wraps(original)
        def train_step(*args: Any, **kwargs: Any) -> Any:
            done = kwargs.get("iteration")
            session.next_step(None if done is None else done + 1)
            return original(*args, **kwargs)

        _put(session, training, "train_step", train_step)


def install(session: Session) -> None:
    """Has all ranks agree before the first step: now if Megatron's groups are there, else when they are made.

    Raises:
        ConfigMismatchError: Megatron's groups are there, and the ranks do not run the same.
    """
    session.trust = Trust(session)
    if dist.is_initialized() and parallel_state.model_parallel_is_initialized():
        _or_disable(session)
    original = parallel_state.initialize_model_parallel

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        session.trust.agree_all()
        return result

    _put(session, parallel_state, "initialize_model_parallel", initialize_model_parallel)


def open_transport(session: Session, group: dist.ProcessGroup, channel: str = "") -> Transport:
    """The transport of a group for a session: agreed on, watched, and as deterministic as the config says."""
    trust: Trust | None = session.trust
    if trust is None:
        transport = transport_of(group, timeout_s=session.config.timeout_s, channel=channel, trace=session.trace)
    else:
        trust.agree(group)
        transport = transport_of(
            group,
            timeout_s=session.config.timeout_s,
            channel=channel,
            trace=session.trace,
            flight_recorder=trust.watch(),
            ordered=session.config.deterministic,
            register=session.config.register_buffers,
        )
    if transport.buffer_pool not in session.buffers:
        ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
        session.buffers[transport.buffer_pool] = f"{channel} of ranks {ranks}" if channel else f"ranks {ranks}"
    return transport


def unfit(session: Session) -> Iterator[Problem]:
    """What no rank of this job could do as the config says, as far as Megatron's arguments tell."""
    args = getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)
    if args is None or args.seq_length is None or args.micro_batch_size is None:
        return
    overlap = session.config
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    context = parallel_state.get_context_parallel_world_size()
    rows = args.seq_length * args.micro_batch_size // (tensor * context)
    chunks = overlap.tensor.chunks_per_rank
    if overlap.tensor.method != "none" and tensor > 1 and isinstance(chunks, int) and chunks > rows:
        yield Problem("tensor.chunks_per_rank", chunks, f"a rank has {rows} rows; use {rows} at most, or auto")
    if overlap.tensor.method == "p2p" and tensor > MAX_RANKS:
        yield Problem(
            "tensor.method", "p2p", f"is for {MAX_RANKS} tensor-parallel ranks at most, not {tensor}; use none"
        )


def deadline_of(session: Session, group: dist.ProcessGroup) -> float:
    """Seconds of one wait: the config's, else the process group's own, which Megatron sets."""
    if session.config.timeout_s is not None:
        return session.config.timeout_s
    device = torch.device("cpu" if dist.get_backend(group) == "gloo" else "cuda")
    timeout: Any = group._get_backend(device).options._timeout
    return float(timeout.total_seconds())


def _put(session: Session, owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, replacement)

    def back() -> None:
        # Somebody who wrapped ours since keeps it: what is called then does nothing without the session.
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)

    session.add_close(back)


def _or_disable(session: Session) -> None:
    try:
        session.trust.agree_all()
    except ValueError:
        session.disable()
        raise
