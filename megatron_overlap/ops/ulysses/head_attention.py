"""Attention of one rank's heads over all rows, by head group, forward and backward."""

from __future__ import annotations

import torch

from megatron_overlap.ops.flash_attention import SavedSequence, sequence_backward, sequence_forward
from megatron_overlap.schedules import HeadLayout
from megatron_overlap.schedules.ulysses import Call, Run


class HeadAttention:
    """Attention of the heads of one rank. It saves the tensors that backward needs.

    A message contains for each row and batch entry query heads, then key heads, then value heads, D features each.
    Forward messages contain the key/value heads that are sent with a group. Backward messages contain the gradients of
    those that no later group needs.

    Args:
        heads: heads of every rank and group.
        rank: this rank.
        size: D.
        causal: row i sees rows 0..i.
        scale: factor of the scores.
    """

    def __init__(self, heads: HeadLayout, rank: int, size: int, causal: bool, scale: float) -> None:
        self.heads, self.size = heads, size
        self._rank, self._causal, self._scale = rank, causal, scale
        self._gathered: dict[int, torch.Tensor] = {}
        self._saved: dict[int, list[tuple[Call, SavedSequence]]] = {}
        self._partial_sums: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def queries_width(self, rank: int, group: int) -> int:
        """Features of the query heads: of the result of attention, and of its gradient."""
        return _length(self.heads.queries(rank, group)) * self.size

    def inputs_width(self, rank: int, group: int) -> int:
        """Features of the queries, keys and values that are sent with a group."""
        return self.queries_width(rank, group) + 2 * _length(self.heads.first_keys(rank, group)) * self.size

    def gradients_width(self, rank: int, group: int) -> int:
        """Features of the gradients that are complete after a group."""
        return self.queries_width(rank, group) + 2 * _length(self.heads.last_keys(rank, group)) * self.size

    def split(self, tensor: torch.Tensor, queries: Run, keys: Run) -> tuple[torch.Tensor, ...]:
        """Views of a message `[rows, B, width]`: queries, keys and values, `[rows, B, heads, D]` each."""
        sizes = [_length(queries), _length(keys), _length(keys)]
        return tensor.view(*tensor.shape[:2], sum(sizes), self.size).split(sizes, dim=2)

    def forward(self, group: int, gathered: torch.Tensor, result: torch.Tensor) -> None:
        """`all_to_all.Attend` of forward."""
        heads, rank = self.heads, self._rank
        self._gathered[group] = gathered
        first, last = heads.queries(rank, group)
        query = self.split(gathered, (first, last), heads.first_keys(rank, group))[0]
        out = result.view(*result.shape[:2], last - first, self.size)
        self._saved[group] = []
        for call in heads.calls(rank, group):
            query_heads = slice(call.queries[0] - first, call.queries[1] - first)
            source = call.source_group
            source_keys = heads.first_keys(rank, source)
            _, keys, values = self.split(self._gathered[source], heads.queries(rank, source), source_keys)
            key_heads = slice(call.keys[0] - source_keys[0], call.keys[1] - source_keys[0])
            attended, saved = sequence_forward(
                query[:, :, query_heads],
                keys[:, :, key_heads],
                values[:, :, key_heads],
                causal=self._causal,
                scale=self._scale,
            )
            out[:, :, query_heads].copy_(attended)
            self._saved[group].append((call, saved))

    def backward(self, group: int, gathered: torch.Tensor, result: torch.Tensor) -> None:
        """`all_to_all.Attend` of backward: `gathered` is the gradient of the result of forward."""
        heads, rank = self.heads, self._rank
        first, last = heads.queries(rank, group)
        complete = heads.last_keys(rank, group)
        grad = gathered.view(*gathered.shape[:2], last - first, self.size)
        dq, dk, dv = self.split(result, (first, last), complete)
        for call, saved in self._saved[group]:
            query_heads = slice(call.queries[0] - first, call.queries[1] - first)
            query_grad, *key_grads = sequence_backward(
                saved, grad[:, :, query_heads], causal=self._causal, scale=self._scale
            )
            dq[:, :, query_heads].copy_(query_grad)
            start, stop = call.keys
            if complete[0] <= start and stop <= complete[1] and not self._partial_sums.keys() & range(start, stop):
                key_heads = slice(start - complete[0], stop - complete[0])
                dk[:, :, key_heads].copy_(key_grads[0])
                dv[:, :, key_heads].copy_(key_grads[1])
                continue
            for head in range(start, stop):
                self._add(head, [key_grad[:, :, head - start] for key_grad in key_grads])
                if head in range(*complete):
                    for gradient, total in zip((dk, dv), self._partial_sums.pop(head), strict=True):
                        gradient[:, :, head - complete[0]].copy_(total)

    def _add(self, head: int, terms: list[torch.Tensor]) -> None:
        """Adds to the gradients of a key/value head that several groups use. The sum is rounded once."""
        before = self._partial_sums.get(head)
        sums = [term.float() if term.element_size() < 4 else term for term in terms]
        if before is not None:
            sums = [total.add_(term) for total, term in zip(before, sums, strict=True)]
        self._partial_sums[head] = (sums[0], sums[1])


def _length(run: Run) -> int:
    return max(0, run[1] - run[0])
