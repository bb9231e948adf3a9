"""All ranks of a group decide alike, or none does: found out over their store, with a deadline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

_MOST_KEYS = 8
"""Differences that are told; the rest are counted."""
_ANSWER_S = 5.0
"""What rank 0 is given, beyond the deadline, to say what it found."""


def first_objection(store: dist.Store, rank: int, size: int, topic: str, objection: str, deadline_s: float) -> str:
    """Tells all ranks what speaks against `topic` here, and returns the objection of the lowest rank that has one.

    Every rank gets the same answer, the empty text where nobody objects. A rank that says nothing until the deadline
    is an objection too, but then the ranks may disagree: the caller must treat it as an error or never talk again.

    Args:
        store: shared by exactly these ranks.
        rank: this rank.
        size: number of ranks.
        topic: unique for this decision.
        objection: what speaks against it on this rank; empty if nothing.
        deadline_s: seconds to wait for each rank.
    """
    store.set(f"{topic}/{rank}", objection)
    keys = [f"{topic}/{other}" for other in range(size)]
    try:
        store.wait(keys, timedelta(seconds=deadline_s))
    except (RuntimeError, TimeoutError):
        silent = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        return f"rank {', '.join(silent)} of the group did not answer within {deadline_s:g} s"
    for other, key in enumerate(keys):
        text = store.get(key).decode()
        if text:
            return text if other == rank and size == 1 else f"rank {other} of the group: {text}"
    return ""


def compare(
    store: dist.Store, rank: int, ranks: list[int], topic: str, facts: Mapping[str, str], deadline_s: float
) -> str:
    """What differs between the ranks' `facts`: the same text on every rank, empty where nothing does.

    Rank 0 of the group reads what all say and tells everybody what it found, so that the store is asked a number of
    times that grows with the ranks and not with their square. A rank that says nothing until the deadline is named.

    Args:
        store: shared by exactly these ranks.
        rank: this rank in the group.
        ranks: global ranks of the group, for people.
        topic: unique for this exchange.
        facts: what must be the same everywhere, by name.
        deadline_s: seconds to wait for the others.
    """
    store.set(f"{topic}/{rank}", json.dumps(facts))
    if rank == 0:
        store.set(f"{topic}/found", _look(store, ranks, topic, deadline_s))
    try:
        store.wait([f"{topic}/found"], timedelta(seconds=deadline_s + _ANSWER_S))
        return store.get(f"{topic}/found").decode()
    except (RuntimeError, TimeoutError):
        return f"rank {ranks[0]} did not say within {deadline_s + _ANSWER_S:g} s whether all ranks agree"


def _look(store: dist.Store, ranks: list[int], topic: str, deadline_s: float) -> str:
    keys = [f"{topic}/{index}" for index in range(len(ranks))]
    try:
        store.wait(keys, timedelta(seconds=deadline_s))
    except (RuntimeError, TimeoutError):
        silent = [str(rank) for rank, key in zip(ranks, keys, strict=True) if not store.check([key])]
        return f"rank {', '.join(silent)}: did not say within {deadline_s:g} s what it runs; is the plugin on there?"
    return differences({rank: json.loads(store.get(key)) for rank, key in zip(ranks, keys, strict=True)})


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """What differs, as `key: 2 on rank 0-2, 4 on rank 3; ...`; empty where nothing does."""
    every = {key for said in facts.values() for key in said}
    texts = []
    for key in sorted(every):
        values: dict[str, list[int]] = {}
        for rank, said in facts.items():
            values.setdefault(said.get(key, "nothing"), []).append(rank)
        if len(values) > 1:
            texts.append(f"{key}: " + ", ".join(f"{value} on rank {_runs(who)}" for value, who in values.items()))
    more = f"; and {len(texts) - _MOST_KEYS} more" if len(texts) > _MOST_KEYS else ""
    return "; ".join(texts[:_MOST_KEYS]) + more


def _runs(numbers: list[int]) -> str:
    """`0-2, 5` for 0, 1, 2, 5."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
