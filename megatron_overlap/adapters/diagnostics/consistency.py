"""Checks that all ranks run the same config, versions and patches, when Megatron makes its groups or at `enable`.

A program that makes its own groups is checked group by group, when the first transport of a group is opened.
"""

import sys
from functools import cached_property, partial
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_overlap.adapters.wrapping import Method
from megatron_overlap.comm import Transport, TransportOptions
from megatron_overlap.comm.host_group import store_beside, timeout_of
from megatron_overlap.comm.symmetric.cuda import open_copies
from megatron_overlap.comm.symmetric.nodes import CopyNodesTransport
from megatron_overlap.comm.transport import TransportError
from megatron_overlap.config import ConfigError
from megatron_overlap.diagnostics.consistency import compare, ranks_text
from megatron_overlap.diagnostics.flight_recorder import FlightRecorder
from megatron_overlap.diagnostics.heartbeat import Heartbeat
from megatron_overlap.schedules.gather_scatter import MAX_RANKS
from megatron_overlap.session import Adapter, Session


class ConfigMismatchError(ValueError):
    """Configs, versions or patches of the ranks differ, or a rank did not answer; names key, ranks and values."""


class ConsistencyCheck(Adapter):
    """The consistency check of one session, and the flight recorder of its messages."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self._world: dist.ProcessGroup | None = None  # the group of all ranks, once they passed the check
        self._groups: set[dist.ProcessGroup] = set()

    @cached_property
    def flight_recorder(self) -> FlightRecorder:
        """The flight recorder of this rank; made at first use, which needs torch.distributed."""
        recorder = FlightRecorder(dist.get_rank(), self.session, self.session.consistency_facts())
        self.session.add_close(recorder.close)
        return recorder

    def post_mortem(self, error: BaseException) -> str | None:
        """Writes the flight recorder's file after `error` ended this rank; returns its path, or None."""
        return self.flight_recorder.post_mortem(error) if "flight_recorder" in vars(self) else None

    def start(self) -> None:
        if dist.is_initialized() and parallel_state.model_parallel_is_initialized():
            self.check_all_ranks()

    def check_all_ranks(self) -> None:
        """Compares the facts of all ranks of the job; collective. Raises ConfigMismatchError or ConfigError."""
        world = dist.group.WORLD
        assert world is not None
        if self._world not in (None, world):
            self._reset()
        self._compare(world)
        check_settings(self.session)
        self._world = world
        recorder = self.flight_recorder
        if recorder.heartbeat is None and dist.get_world_size() > 1:
            deadline_s = deadline_of(self.session, world)
            recorder.heartbeat = Heartbeat(store_beside(world), dist.get_rank(), deadline_s, recorder.doing)
        if "megatron.training.training" in sys.modules:  # this process runs Megatron's training loop
            self.session.apply_patches({"training"})

    def recorder_of(self, group: dist.ProcessGroup) -> FlightRecorder:
        """Compares the ranks of `group`, unless the whole job passed the check, and returns the flight recorder."""
        if self._world is None and group not in self._groups:
            self._compare(group)
            self._groups.add(group)
        return self.flight_recorder

    def _compare(self, group: dist.ProcessGroup) -> None:
        ranks = dist.get_process_group_ranks(group)
        facts, deadline_s = self.session.consistency_facts(), deadline_of(self.session, group)
        found = compare(store_beside(group), dist.get_rank(group), ranks, "facts", facts, deadline_s)
        if found:
            raise ConfigMismatchError(f"the ranks differ: {found}: start all ranks with the same config and versions")

    def _reset(self) -> None:
        """Drops everything of the old process groups, as after an in-process restart: their peers may have ended."""
        self.session.drop_adapters()
        self.session.transports.close()
        if "flight_recorder" in vars(self):
            self.flight_recorder.close()
            del self.flight_recorder
        self._groups.clear()


def initialize_model_parallel(original: Method, session: Session) -> Method:
    """Factory of a patch: compares all ranks when Megatron made its groups, or at `enable` where they exist."""
    check = session.adapter(ConsistencyCheck)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        check.check_all_ranks()
        return result

    return run


def open_transport(session: Session, group: dist.ProcessGroup, channel: str = "") -> Transport:
    """Return the transport of a group and channel for a session.

    The first call is collective. It compares the configurations of the ranks.
    """
    if (transport := session.transports.find(group, channel)) is not None:
        return transport
    options = TransportOptions(
        channel=channel,
        timeout_s=session.config.timeout_s,
        trace=session.trace,
        flight_recorder=_checked_recorder(session, group),
        ordered=bool(session.config.deterministic),
        register_buffers=session.config.register_buffers,
    )
    return session.transports.open(group, options)


def _checked_recorder(session: Session, group: dist.ProcessGroup) -> FlightRecorder | None:
    check = session.find(ConsistencyCheck)
    return None if check is None else check.recorder_of(group)


def open_device_transport(
    session: Session, group: dist.ProcessGroup, channel: str = "", *, over_nodes: bool = False
) -> Transport:
    """Return the transport of operations on symmetric buffers: copy engines, or as `open_transport`. Collective.

    The report names the transport of each group of GPUs, and why it has no copies. With `over_nodes` a group on several
    hosts has copies inside each host.
    """
    # A group without copies has a transport for each channel.
    fallback = f"without copies {channel}"
    transport = session.transports.find(group, "copies") or session.transports.find(group, fallback)
    if transport is not None:
        return transport
    if dist.get_backend(group) != "nccl":
        return open_transport(session, group, channel)
    found = _open_copies(session, group, over_nodes=over_nodes)
    ranks = f"ranks {ranks_text(dist.get_process_group_ranks(group))}"
    copies = "copy engines" + ", NCCL between hosts" * isinstance(found, CopyNodesTransport)
    session.counters.transports[ranks] = f"NCCL: {found}" if isinstance(found, str) else copies
    transport = open_transport(session, group, channel) if isinstance(found, str) else found
    session.transports.insert(group, transport, fallback if isinstance(found, str) else "copies")
    return transport


def _open_copies(session: Session, group: dist.ProcessGroup, *, over_nodes: bool) -> Transport | str:
    """The transport of copy engines of a group, or why it has none."""
    chosen = session.config.transport
    if chosen == "nccl":
        return "overlap.transport is nccl"
    recorder = _checked_recorder(session, group)
    transport: Transport | str = "a trace measures the messages of NCCL"
    if session.trace is None:
        options = TransportOptions("copies", timeout_s=session.config.timeout_s, flight_recorder=recorder)
        transport = open_copies(group, options, partial(open_transport, session) if over_nodes else None)
    if isinstance(transport, str) and chosen == "copies":
        raise TransportError(f"overlap.transport: copies: {transport}; use auto")
    return transport


def check_settings(session: Session) -> None:
    """Raises ConfigError for a setting that no rank of this job can run, as far as Megatron's arguments show."""
    args = training_arguments()
    if args is None or args.seq_length is None or args.micro_batch_size is None:
        return
    size, overlap = parallel_state.get_tensor_model_parallel_world_size(), session.config.tensor
    rows = args.seq_length * args.micro_batch_size // (size * parallel_state.get_context_parallel_world_size())
    chunks = overlap.chunks_per_rank
    if overlap.method != "none" and size > 1 and isinstance(chunks, int) and chunks > rows:
        remedy = f"a rank has {rows} rows; use {rows} at most, or auto"
        raise ConfigError("overlap config", "tensor.chunks_per_rank", chunks, remedy)
    if overlap.method == "p2p" and size > MAX_RANKS:
        remedy = f"is for {MAX_RANKS} tensor-parallel ranks at most, not {size}; use none"
        raise ConfigError("overlap config", "tensor.method", "p2p", remedy)


def training_arguments() -> Any:
    """The arguments of Megatron's training in this process; None outside it."""
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None)


def deadline_of(session: Session, group: dist.ProcessGroup) -> float:
    """Seconds of one wait: `overlap.timeout_s`, else the timeout of the process group, which Megatron sets."""
    return session.config.timeout_s or timeout_of(group)
