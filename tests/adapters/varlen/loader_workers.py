"""What the workers run: a loader over documents whose ids say where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from megatron_overlap.adapters.varlen.loader import Batch, Channel, DocumentLoader
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.schedules.varlen import CostModel, Topology, partition
from megatron_overlap.schedules.varlen.baselines import ring_over_all
from megatron_overlap.schedules.varlen.messages import Traffic, _messages_of, messages_of
from megatron_overlap.schedules.varlen.rebalance import linear_layout

Row = tuple[int, int, int, int, float]


class Numbered:
    """Documents of given lengths; token p of document d is `1000 d + p`, its label the negative of it."""

    def __init__(self, lengths: Sequence[int], broken: int | None = None) -> None:
        self._lengths = lengths
        self._broken = broken

    def __len__(self) -> int:
        return len(self._lengths)

    def rows(self, index: int) -> int:
        return self._lengths[index]

    def read(self, index: int) -> np.ndarray:
        if index == self._broken:
            raise OSError(f"document {index} cannot be read")
        ids = 1000 * index + np.arange(self._lengths[index])
        return np.stack([ids, -ids, index % 2 + 0 * ids], axis=1).astype(np.int32)


def make(
    group: dist.ProcessGroup, documents: Numbered, tokens: int, method: str = "balanced", **options: int
) -> tuple[DocumentLoader, Channel]:
    size = group.size()
    channel = Channel(HostGroup(group, timeout_s=20, name="data loader"))
    share = -(-tokens // size)
    planner = {"balanced": partition, "ring": ring_over_all}[method]
    # Linear layers so slow that rows always move to where they are even.
    slow = CostModel(linear_fs=10**15)
    plan = partial(planner, topology=Topology(1, size), capacity=share + share // 16, cost=slow)
    options.setdefault("seed", 1)
    return DocumentLoader(documents, channel, plan, tokens=tokens, **options), channel


def rows_of(batch: Batch) -> list[Row]:
    """(document in the micro-batch, position, token, label, counts) of every row but padding, after looking at them."""
    shapes = {column.shape for column in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)}
    assert shapes == {batch.tokens.shape}
    columns = (batch.documents, batch.position_ids, batch.tokens, batch.labels, batch.loss_mask)
    lists = [column[0].tolist() for column in columns]
    assert not any(lists[4][batch.num_rows :]), "padding counts nothing"
    assert all(document == -1 for document in lists[0][batch.num_rows :])
    return list(zip(*(values[: batch.num_rows] for values in lists), strict=True))


def batches(
    group: dist.ProcessGroup, lengths: Sequence[int], tokens: int, count: int, method: str = "balanced", **options: int
) -> list[tuple[int, list[Row]]]:
    """Padded and real rows of this rank in the first micro-batches."""
    loader, channel = make(group, Numbered(lengths), tokens, method, **options)
    found = []
    for batch in (next(loader) for _ in range(count)):
        rows = rows_of(batch)
        _, layout = linear_layout(batch.plan)
        mine = [(p.document, at) for p in layout[group.rank()] for at in range(p.start, p.stop)]
        assert [row[:2] for row in rows] == mine, "rows lie as the plan says"
        found.append((batch.tokens.shape[1], rows))
    channel.close()
    return found


def what_a_failing_read_does(group: dist.ProcessGroup) -> str:
    """One rank cannot read a document and leaves; its peers must not wait for it for ever."""
    documents = Numbered([5] * 8, broken=3 if group.rank() == 0 else None)
    loader, channel = make(group, documents, 20)
    try:
        for _ in range(8):
            next(loader)
    except (OSError, RuntimeError) as error:
        channel.group.close()
        return type(error).__name__
    return "none"


def programs_made_late(group: dist.ProcessGroup, lengths: Sequence[int], tokens: int, count: int) -> list[int]:
    """Programs that a layer had to wait for, of each micro-batch."""
    loader, channel = make(group, Numbered(lengths), tokens, "ring")
    found = []
    # What models before this one have asked for must not push out what this one needs.
    for size in range(1, 20):
        messages_of(partition([8], Topology(1, group.size()), capacity=8), 0, Traffic("kv", size, size), None)
    for _ in range(count):
        batch = next(loader)
        channel.thread.submit(int).result()  # the loader is done with the micro-batch after
        made = _messages_of.cache_info().misses
        messages_of(batch.plan, 0, Traffic("kv", 12, 34), None)
        found.append(_messages_of.cache_info().misses - made)
    channel.close()
    return found
