"""Balanced attention in Megatron: a core attention that the layer spec names, and rotary embedding by token position.

No patch: the spec, a subclass of `PackedSeqParams` and the model's module `rotary_pos_emb` are seams of Megatron's own.
Outside attention the order of a rank's rows means nothing to Megatron, so that they may be anybody's.
"""

from __future__ import annotations

import math
import platform
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch.nn import functional

from megatron_overlap.adapters.diagnostics.consistency import open_transport
from megatron_overlap.adapters.varlen.loader import Batch, Channel
from megatron_overlap.adapters.wrapping import untraced
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.ops import balanced_attention
from megatron_overlap.ops.varlen.executor import VarlenTransports
from megatron_overlap.schedules.varlen import CostModel, Plan, Topology
from megatron_overlap.schedules.varlen.baselines import METHODS
from megatron_overlap.session import Adapter, Session


class VarlenError(ValueError):
    """Megatron is asked for what balanced attention cannot do; names the flag, its value and the remedy."""


@dataclass
class PackedRows(PackedSeqParams):  # type: ignore[misc]
    """What the attention of every layer needs to know of a micro-batch; Megatron passes it through.

    `qkv_format` is `sbhd`, so that Megatron keeps off its own way with packed sequences.

    Attributes:
        batch: the micro-batch; its position ids are on the device.
        engine: who runs its plan.
    """

    batch: Batch | None = None
    engine: VarlenAdapter | None = None

    @classmethod
    def of(cls, batch: Batch, engine: VarlenAdapter) -> PackedRows:
        """The parameters of a micro-batch."""
        return cls(qkv_format="sbhd", batch=batch, engine=engine)


class VarlenAdapter(Adapter):
    """What the attention layers and loaders of a session share: plans, messages, counting.

    Args:
        session: closes what is opened here.
        group: the context-parallel ranks.
        cost: of the model's layers.
        tokens: most tokens of a micro-batch, over all ranks of the group.
    """

    def __init__(self, session: Session, group: dist.ProcessGroup, cost: CostModel, tokens: int) -> None:
        super().__init__(session)
        self._wanted = session.config.varlen
        self._cost = cost
        self.group = group
        self.channel = Channel(HostGroup(group, name="data loader"))
        session.add_close(self.channel.close)
        self.transports = VarlenTransports.open(group, lambda channel: open_transport(session, group, channel))
        share = -(-tokens // group.size())
        self.capacity = share + -(-share // 16) if self._wanted.capacity == "auto" else self._wanted.capacity
        self.topology = self._topology()

    def drop(self) -> None:
        """Closes what was opened, without waiting for loaders."""
        self.channel.thread.shutdown(wait=False, cancel_futures=True)
        self.channel.group.close()
        self.session.remove(VarlenAdapter)

    @property
    def masked(self) -> bool:
        """Whether Megatron's own attention runs."""
        return self._wanted.method == "masked"

    def plan(self, lengths: Sequence[int]) -> Plan:
        """Where the tokens of a micro-batch are in attention; the same on every rank."""
        method = "balanced" if self.masked else self._wanted.method
        return METHODS[method](lengths, self.topology, capacity=self.capacity, cost=self._cost)

    @untraced
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, plan: Plan, softmax_scale: float
    ) -> torch.Tensor:
        """Causal attention of each document alone: `[rows, heads, size]` in and out, in the layout of linear layers."""
        return balanced_attention(
            query,
            key,
            value,
            plan,
            group=self.transports,
            softmax_scale=softmax_scale,
            layout="linear",
            observer=self._observer("balanced_attention", f"{query.shape[1]}x{query.shape[2]}"),
        )

    def _observer(self, op: str, heads: str) -> Callable[[Any, int], None]:
        def observe(direction: Any, num_bytes: int) -> None:
            self.session.counters.overlapped("attention", heads, op, direction, num_bytes)

        return observe

    def _topology(self) -> Topology:
        wanted, ranks = self._wanted, self.group.size()
        hosts = [host for (host,) in self.channel.group.all_gather([zlib.crc32(platform.node().encode())])]
        nodes = nodes_of(hosts) if wanted.nodes == "auto" else wanted.nodes
        if ranks % nodes:
            raise VarlenError(f"overlap.varlen.nodes: {nodes}: must divide the {ranks} context ranks, or auto")
        return Topology(
            nodes,
            ranks // nodes,
            min(wanted.nics_per_node, ranks // nodes),
            intra_gbps=wanted.intra_gbps,
            inter_gbps=wanted.inter_gbps,
            routing=wanted.routing,
        )


def nodes_of(hosts: Sequence[int]) -> int:
    """Nodes that the ranks of a group are on, given their hosts; 1 where they are not spread evenly and in order."""
    runs = [(host, len(list(run))) for host, run in groupby(hosts)]
    even = len({host for host, _ in runs}) == len(runs) and len({size for _, size in runs}) == 1
    return len(runs) if even else 1


class BalancedCoreAttention(torch.nn.Module):
    """Stands where Megatron's `DotProductAttention` does in a layer spec.

    Raises:
        VarlenError: the layer asks for something that balanced attention does not do.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        problems = (
            (dropout > 0, f"--attention-dropout {dropout}: use 0"),
            (attn_mask_type is not AttnMaskType.causal, f"attention mask {attn_mask_type.name}: only causal is done"),
            (attention_type != "self", f"{attention_type}-attention: only self-attention is done"),
        )
        for wrong, text in problems:
            if wrong:
                raise VarlenError(f"overlap.varlen: layer {layer_number}: {text}")
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
        """`[rows, 1, heads, size]` of this rank to `[rows, 1, heads x size]`; zeros in the rows of padding."""
        batch, engine = _rows_of(packed_seq_params)
        if attention_mask is not None or attention_bias is not None:
            raise VarlenError("overlap.varlen: attention mask or bias: attention is causal in each document; give none")
        rows = batch.num_rows
        mine = [tensor[:rows].squeeze(1) for tensor in (query, key, value)]
        context = engine.attend(mine[0], mine[1], mine[2], batch.plan, self._softmax_scale)
        return functional.pad(context.flatten(1), (0, 0, 0, len(query) - rows)).unsqueeze(1)


class MaskedCoreAttention(DotProductAttention):  # type: ignore[misc]
    """Megatron's own attention with a mask that keeps the documents of a row apart: what ours is checked against.

    One context rank, memory quadratic in a row's tokens.
    """

    def __init__(self, config: Any, layer_number: int, attn_mask_type: AttnMaskType, *args: Any, **kwargs: Any) -> None:
        # Causal has a mask of its own, which some kernels take whatever mask is given.
        super().__init__(config, layer_number, AttnMaskType.arbitrary, *args, **kwargs)

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **kwargs: Any
    ) -> torch.Tensor:
        """See `DotProductAttention.forward`."""
        batch, _engine = _rows_of(kwargs["packed_seq_params"])
        documents = batch.documents[0]
        apart = documents[:, None] != documents[None, :]
        later = torch.ones_like(apart).triu(1)
        mask = (apart | later)[None, None]
        result: torch.Tensor = super().forward(query, key, value, mask, AttnMaskType.arbitrary)
        return result


class TokenRotary(torch.nn.Module):
    """Rotary embedding by the position of each token in its document, in the place of Megatron's by row.

    Megatron asks for a length and then for the angles of so many rows. Here the length it is given, and hands back, are
    the rows' positions.

    Args:
        embedding: Megatron's.
        max_positions: positions are below this.
    """

    def __init__(self, embedding: torch.nn.Module, max_positions: int) -> None:
        super().__init__()
        self.embedding = embedding
        self._max_positions = max_positions
        self._angles: torch.Tensor | None = None

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The positions of the rows; the micro-batch is the last argument."""
        batch, _ = _rows_of(kwargs.get("packed_seq_params", args[-1] if args else None))
        return batch.position_ids[0]

    def forward(self, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """`[rows, 1, 1, size]` angles."""
        if self._angles is None or self._angles.device != positions.device:
            # Told that rows are packed, Megatron gives the whole table and not the part of a context rank.
            self._angles = self.embedding(self._max_positions, packed_seq=True).to(positions.device)
        return self._angles.index_select(0, positions)


def _rows_of(packed_seq_params: Any) -> tuple[Batch, VarlenAdapter]:
    if not isinstance(packed_seq_params, PackedRows):
        raise VarlenError(
            "overlap.varlen: the model was called without a micro-batch of documents: use the provided scripts, and no "
            "inference or evaluation of another kind"
        )
    assert packed_seq_params.batch is not None
    assert packed_seq_params.engine is not None
    return packed_seq_params.batch, packed_seq_params.engine
