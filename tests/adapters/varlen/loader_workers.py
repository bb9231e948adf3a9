"""Worker functions: a loader over documents whose token ids encode document and position."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.distributed as dist

from megatron_overlap.adapters.varlen.loader import Batch, DocumentLoader, LoaderThread
from megatron_overlap.comm.host_group import HostGroup
from megatron_overlap.schedules.varlen import CostModel, Topology, partition
from megatron_overlap.schedules.varlen.messages import Traffic, messages_of
from megatron_overlap.schedules.varlen.partition import ring_over_all
from megatron_overlap.schedules.varlen.rebalance import linear_layout

Row = tuple[int, int, int, int, float]


class NumberedDocuments:
    """Documents of given lengths. Token p of document d is `1000 d + p`; its label is the negative."""

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


def make_loader(
    group: dist.ProcessGroup, documents: NumberedDocuments, tokens: int, method: str = "balanced", **options: int
) -> tuple[DocumentLoader, LoaderThread]:
    size = group.size()
    thread = LoaderThread(HostGroup(group, timeout_s=20, name="data loader"))
    share = -(-tokens // size)
    planner = {"balanced": partition, "ring": ring_over_all}[method]
    # With linear layers this slow, rebalancing always pays off.
    slow_linear = CostModel(linear_fs=10**15)
    plan = partial(planner, topology=Topology(1, size), capacity=share + share // 16, cost=slow_linear)
    options.setdefault("seed", 1)
    return DocumentLoader(documents, thread, plan, tokens=tokens, **options), thread


def rows_of(batch: Batch) -> list[Row]:
    """Checks a batch; returns (document, position, token, label, loss mask) of every row without padding."""
    shapes = {column.shape for column in (batch.tokens, batch.labels, batch.loss_mask, batch.position_ids)}
    assert shapes == {batch.tokens.shape}
    columns = (batch.documents, batch.position_ids, batch.tokens, batch.labels, batch.loss_mask)
    lists = [column[0].tolist() for column in columns]
    assert not any(lists[4][batch.num_rows :]), "the loss mask of padding is 0"
    assert all(document == -1 for document in lists[0][batch.num_rows :])
    return list(zip(*(values[: batch.num_rows] for values in lists), strict=True))


def batches(
    group: dist.ProcessGroup, lengths: Sequence[int], tokens: int, count: int, method: str = "balanced", **options: int
) -> list[tuple[int, list[Row]]]:
    """Number of rows with padding, and the rows without, of this rank in the first micro-batches."""
    loader, thread = make_loader(group, NumberedDocuments(lengths), tokens, method, **options)
    found = []
    for batch in (next(loader) for _ in range(count)):
        rows = rows_of(batch)
        layout = linear_layout(batch.plan)
        own = [(p.document, at) for p in layout[group.rank()] for at in range(p.start, p.stop)]
        assert [row[:2] for row in rows] == own, "the rows are in the order of the plan"
        found.append((batch.tokens.shape[1], rows))
    thread.close()
    return found


def exception_after_a_failed_read(group: dist.ProcessGroup) -> str:
    """One rank cannot read a document and closes its group; its peers must get an error instead of waiting forever."""
    documents = NumberedDocuments([5] * 8, broken=3 if group.rank() == 0 else None)
    loader, thread = make_loader(group, documents, 20)
    try:
        for _ in range(8):
            next(loader)
    except (OSError, RuntimeError) as error:
        thread.group.close()
        return type(error).__name__
    return "none"


def messages_computed_late(group: dist.ProcessGroup, lengths: Sequence[int], tokens: int, count: int) -> list[int]:
    """Number of `messages_of` calls of a layer that are not precomputed, for each micro-batch."""
    loader, thread = make_loader(group, NumberedDocuments(lengths), tokens, "ring")
    found = []
    # Earlier calls with other traffic must not evict the messages of this model.
    for size in range(1, 20):
        messages_of(partition([8], Topology(1, group.size()), capacity=8), 0, Traffic("kv", size, size))
    for _ in range(count):
        batch = next(loader)
        thread.executor.submit(int).result()  # the loader has prepared the next micro-batch
        misses = messages_of.cache_info().misses
        messages_of(batch.plan, 0, Traffic("kv", 12, 34))
        found.append(messages_of.cache_info().misses - misses)
    thread.close()
    return found
