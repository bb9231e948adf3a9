"""Balanced attention in Megatron: a core attention module for the layer spec, and rotary embedding by token position.

It needs no patch: Megatron accepts a layer spec, a subclass of `PackedSeqParams` and another `rotary_pos_emb` module.
Outside attention Megatron does not use the order of a rank's rows, so a rank may hold any rows.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.nn import functional

from megatron_overlap.adapters.diagnostics.consistency import open_device_transport, open_transport
from megatron_overlap.adapters.varlen.loader import Batch, LoaderThread
from megatron_overlap.adapters.wrapping import untraced
from megatron_overlap.comm import Transport
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.ops import balanced_attention
from megatron_overlap.ops.varlen.ring import VarlenTransports
from megatron_overlap.schedules.gather_scatter import Nodes
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology
from megatron_overlap.schedules.varlen.partition import METHODS
from megatron_overlap.session import Adapter, Session


class VarlenError(ValueError):
    """Balanced attention does not support an argument of Megatron; names the flag, its value and the remedy."""


@dataclass(kw_only=True)
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """The micro-batch, with position ids on the device, and its adapter. Megatron passes them to every attention."""

    qkv_format: str = "sbhd"  # Megatron does not use its own support of packed sequences.
    batch: Batch
    adapter: VarlenAdapter


class VarlenAdapter(Adapter):
    """Planner, transports and loader thread that the attention layers and loaders of a session share.

    `group` has the context-parallel ranks, `tokens` is the largest number of tokens of their micro-batch, and `cost`
    the cost model of the layers.
    """

    def __init__(self, session: Session, group: dist.ProcessGroup, cost: CostModel, tokens: int) -> None:
        super().__init__(session)
        self._wanted = wanted = session.config.varlen
        self._cost, ranks = cost, group.size()
        self.loader_thread = LoaderThread(HostGroup(group, name="data loader"))
        session.add_close(self.loader_thread.close)

        def open_channel(name: str) -> Transport:
            return open_transport(session, group, name) if name else open_device_transport(session, group)

        self.transports = VarlenTransports.open(group, open_channel)
        share = -(-tokens // ranks)
        self.capacity = share + -(-share // 16) if wanted.capacity == "auto" else wanted.capacity
        hosts = [host for (host,) in self.loader_thread.group.all_gather([zlib.crc32(platform.node().encode())])]
        nodes = nodes_of(hosts) if wanted.nodes == "auto" else wanted.nodes
        if ranks % nodes:
            raise VarlenError(f"overlap.varlen.nodes: {nodes}: must divide the {ranks} context ranks, or auto")
        nics = min(wanted.nics_per_node, ranks // nodes)
        gbps = wanted.intra_gbps, wanted.inter_gbps
        self.topology = Topology(nodes, ranks // nodes, nics, *gbps, routing=wanted.routing)

    def drop(self) -> None:
        """Closes the loader thread without waiting for the loaders; the session closes the transports."""
        self.loader_thread.executor.shutdown(wait=False, cancel_futures=True)
        self.loader_thread.group.close()
        self.session.remove(VarlenAdapter)

    @property
    def masked(self) -> bool:
        """Whether stock attention with a mask runs."""
        return self._wanted.method == "masked"

    def plan(self, lengths: Sequence[int]) -> Plan:
        """The plan of a micro-batch with documents of these lengths; the same on every rank."""
        method = "balanced" if self.masked else self._wanted.method
        return METHODS[method](lengths, self.topology, capacity=self.capacity, cost=self._cost)

    @untraced
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, scale: float
    ) -> torch.Tensor:
        """Causal attention of each document alone: `[rows, heads, D]` to the same shape, in the linear layout."""
        heads = f"{query.shape[1]}x{query.shape[2]}"
        observer = partial(self.session.counters.overlapped, "attention", heads, "balanced_attention")
        return balanced_attention(
            query, key, value, plan, group=self.transports, softmax_scale=scale, layout="linear", observer=observer
        )


def nodes_of(hosts: Sequence[int]) -> int:
    """Number of nodes of a group, given the host of each rank; 1 if the hosts are not even, consecutive blocks."""
    try:
        return Nodes.of(list(map(str, hosts))).num_nodes
    except ValueError:
        return 1


class BalancedCoreAttention(torch.nn.Module):
    """Core attention for a layer spec of causal self-attention without dropout, in place of `DotProductAttention`."""

    def __init__(self, config: Any, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self._softmax_scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> torch.Tensor:
        """`[rows, 1, heads, D]` of this rank to `[rows, 1, heads * D]`; padding rows get zeros."""
        batch, adapter = _batch_of(packed_seq_params)
        if attention_mask is not None or attention_bias is not None:
            raise VarlenError("overlap.varlen: attention mask or bias: attention is causal in each document; give none")
        rows = batch.num_rows
        q, k, v = (tensor[:rows].squeeze(1) for tensor in (query, key, value))
        context = adapter.attend(q, k, v, batch.plan, self._softmax_scale)
        return functional.pad(context.flatten(1), (0, 0, 0, len(query) - rows)).unsqueeze(1)


class MaskedCoreAttention(DotProductAttention):  # type: ignore[misc]
    """Stock attention with a mask that separates the documents of a micro-batch: the reference of balanced attention.

    It needs one context rank, and memory quadratic in the tokens of a micro-batch.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, *args: Any, **kwargs: Any) -> None:
        # With mask type `causal` some kernels ignore the mask argument.
        super().__init__(config, layer_number, AttnMaskType.arbitrary, *args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> torch.Tensor:
        """See `DotProductAttention.forward`."""
        batch, _adapter = _batch_of(kwargs["packed_seq_params"])
        documents = batch.documents[0]
        other_document = documents[:, None] != documents[None, :]
        later = torch.ones_like(other_document).triu(1)
        mask = (other_document | later)[None, None]
        result: torch.Tensor = super().forward(query, key, value, mask, AttnMaskType.arbitrary)
        return result


class TokenRotary(torch.nn.Module):
    """Rotary embedding by the position of each token in its document; the stock embedding uses the row number.

    Megatron calls `get_rotary_seq_len` and passes its result to `forward`. Here the result is the positions of the rows
    instead of their number. All positions are below `max_positions`.
    """

    def __init__(self, embedding: torch.nn.Module, max_positions: int) -> None:
        super().__init__()
        self.embedding = embedding
        self._max_positions = max_positions
        self._angles: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The positions of the rows. The micro-batch is the last argument."""
        batch, _ = _batch_of(kwargs.get("packed_seq_params", args[-1] if args else None))
        return batch.position_ids[0]

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """Angles `[rows, 1, 1, D]`."""
        if self._angles is None or self._angles.device != positions.device:
            # With `packed_seq=True` Megatron returns the whole table instead of the part of a context rank.
            self._angles = self.embedding(self._max_positions, packed_seq=True).to(positions.device)
        return self._angles.index_select(0, positions)


def _batch_of(packed_seq_params: Any) -> tuple[Batch, VarlenAdapter]:
    if not isinstance(packed_seq_params, PackedRows):
        remedy = "use the provided scripts for training and evaluation"
        raise VarlenError(f"overlap.varlen: the model was called without a micro-batch of documents: {remedy}")
    return packed_seq_params.batch, packed_seq_params.adapter
