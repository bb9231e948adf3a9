"""The attending part of Ulysses attention: all rows of one rank's heads, group by group, forward and backward."""

from __future__ import annotations

import torch

from megatron_overlap.ops.flash_attention import SavedSequence, sequence_backward, sequence_forward
from megatron_overlap.schedules import HeadLayout
from megatron_overlap.schedules.head_layout import Call

Run = tuple[int, int]


class OwnHeads:
    """Attention of one rank's heads; keeps what backward needs.

    Messages carry, for each row and batch entry, query heads, then key heads, then value heads, each of `size`
    features: inbound the key/value heads that travel with a group, and back, in backward, the gradients of those that
    no later group needs.

    Args:
        heads: the layout.
        rank: whose heads.
        size: D.
        causal: row i sees rows 0..i.
        scale: of the scores.
    """

    def __init__(self, heads: HeadLayout, rank: int, size: int, causal: bool, scale: float) -> None:
        self.heads, self.size = heads, size
        self._rank, self._causal, self._scale = rank, causal, scale
        self._inside: dict[int, torch.Tensor] = {}
        self._saved: dict[int, list[tuple[Call, SavedSequence]]] = {}
        self._pending: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def queries_width(self, rank: int, group: int) -> int:
        """Features of the query heads alone: what attention returns, and its gradient."""
        return _length(self.heads.queries(rank, group)) * self.size

    def inbound_width(self, rank: int, group: int) -> int:
        """Features of the queries, keys and values of a group."""
        return self.queries_width(rank, group) + 2 * _length(self.heads.first_keys(rank, group)) * self.size

    def gradient_width(self, rank: int, group: int) -> int:
        """Features of the gradients that are complete after a group."""
        return self.queries_width(rank, group) + 2 * _length(self.heads.last_keys(rank, group)) * self.size

    def split(self, tensor: torch.Tensor, queries: Run, keys: Run) -> tuple[torch.Tensor, ...]:
        """Views of a message `[rows, B, width]`: queries, keys and values, `[rows, B, heads, D]` each."""
        sizes = [_length(queries), _length(keys), _length(keys)]
        return tensor.view(*tensor.shape[:2], sum(sizes), self.size).split(sizes, dim=2)

    def forward(self, group: int, inside: torch.Tensor, result: torch.Tensor) -> None:
        """`Attend` of a forward pass."""
        heads, rank = self.heads, self._rank
        self._inside[group] = inside
        first, last = heads.queries(rank, group)
        query = self.split(inside, (first, last), heads.first_keys(rank, group))[0]
        out = result.view(*result.shape[:2], last - first, self.size)
        self._saved[group] = []
        for call in heads.calls(rank, group):
            here = slice(call.queries[0] - first, call.queries[1] - first)
            home = heads.first_keys(rank, call.home)
            _, keys, values = self.split(self._inside[call.home], heads.queries(rank, call.home), home)
            there = slice(call.keys[0] - home[0], call.keys[1] - home[0])
            attended, saved = sequence_forward(
                query[:, :, here], keys[:, :, there], values[:, :, there], causal=self._causal, scale=self._scale
            )
            out[:, :, here].copy_(attended)
            self._saved[group].append((call, saved))

    def backward(self, group: int, inside: torch.Tensor, result: torch.Tensor) -> None:
        """`Attend` of a backward pass: `inside` is the gradient of what attention returned."""
        heads, rank = self.heads, self._rank
        first, last = heads.queries(rank, group)
        complete = heads.last_keys(rank, group)
        grad = inside.view(*inside.shape[:2], last - first, self.size)
        dq, dk, dv = self.split(result, (first, last), complete)
        for call, saved in self._saved[group]:
            here = slice(call.queries[0] - first, call.queries[1] - first)
            of_query, *of_keys = sequence_backward(saved, grad[:, :, here], causal=self._causal, scale=self._scale)
            dq[:, :, here].copy_(of_query)
            start, stop = call.keys
            if complete[0] <= start and stop <= complete[1] and not self._pending.keys() & range(start, stop):
                there = slice(start - complete[0], stop - complete[0])
                dk[:, :, there].copy_(of_keys[0])
                dv[:, :, there].copy_(of_keys[1])
                continue
            for head in range(start, stop):
                terms = [of_key[:, :, head - start] for of_key in of_keys]
                self._add(head, terms)
                if head in range(*complete):
                    for gradient, total in zip((dk, dv), self._pending.pop(head), strict=True):
                        gradient[:, :, head - complete[0]].copy_(total)

    def _add(self, head: int, terms: list[torch.Tensor]) -> None:
        """Adds to the gradients of a key/value head that several groups use; the sum is rounded once."""
        before = self._pending.get(head)
        wide = [term.float() if term.element_size() < 4 else term for term in terms]
        if before is not None:
            wide = [total.add_(term) for total, term in zip(before, wide, strict=True)]
        self._pending[head] = (wide[0], wide[1])


def _length(run: Run) -> int:
    return max(0, run[1] - run[0])
