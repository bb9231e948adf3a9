"""Consistency of the ranks of a group, checked over their store with a deadline."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

_MOST = 8  # differences, values and runs of ranks to list; the text counts the others
_REPLY_S = 5.0  # time beyond the deadline for rank 0 to publish the comparison, and for the others to read it


def silent_ranks(store: dist.Store, keys: Sequence[str], deadline_s: float) -> list[int]:
    """Wait for one key of each rank; return the ranks whose key is missing at the deadline."""
    try:
        store.wait(list(keys), timedelta(seconds=deadline_s))
    except (RuntimeError, TimeoutError):
        return [rank for rank, key in enumerate(keys) if not store.check([key])]
    return []


def read(store: dist.Store, keys: Sequence[str]) -> list[str]:
    """Return the texts of keys, once all are set, with one request: the store of a job handles one after another."""
    return [text.decode() for text in store.multi_get(list(keys))]


def first_unsupported_reason(
    store: dist.Store, rank: int, size: int, topic: str, reason: str, deadline_s: float
) -> str:
    """Return the reason of the lowest rank that cannot run a feature; empty if all ranks can. Collective.

    Every rank gets the same text. A rank that publishes nothing before the deadline counts as a reason. Ranks may then
    get different texts: the caller must fail or stop communicating. `topic` is a unique key of this decision.
    """
    store.set(f"{topic}/{rank}", reason)
    keys = [f"{topic}/{other}" for other in range(size)]
    if silent := silent_ranks(store, keys, deadline_s):
        return f"rank {ranks_text(silent)} of the group did not respond within {deadline_s:g} s"
    for other, text in enumerate(read(store, keys)):
        if text:
            return text if size == 1 else f"rank {other} of the group: {text}"
    return ""


def compare(
    store: dist.Store, rank: int, ranks: list[int], topic: str, facts: Mapping[str, str], deadline_s: float
) -> str:
    """Return the differences between the `facts` of the ranks: the same text on every rank, empty without a difference.

    Rank 0 compares the facts and publishes the result, so that the number of store requests is linear in the number of
    ranks. The store holds equal facts once (those of one rank have 3 KiB). The text names each rank, by its global
    number in `ranks`, that publishes no facts before the deadline.
    `topic` is a unique key of this comparison.
    """
    text = json.dumps(facts, sort_keys=True)
    own = hashlib.sha256(text.encode()).hexdigest()
    if not store.check([f"{topic}/{own}"]):
        store.set(f"{topic}/{own}", text)
    store.set(f"{topic}/{rank}", own)
    silent: list[int] = []
    if rank == 0:
        keys = [f"{topic}/{index}" for index in range(len(ranks))]
        if silent := silent_ranks(store, keys, deadline_s):
            names = ranks_text([ranks[index] for index in silent])
            found = f"rank {names}: published no configuration within {deadline_s:g} s; enable the plugin there"
        else:
            digests = dict(zip(ranks, read(store, keys), strict=True))
            of_digest = {each: json.loads(store.get(f"{topic}/{each}")) for each in {*digests.values()}}
            found = differences({rank: of_digest[each] for rank, each in digests.items()}) if len(of_digest) > 1 else ""
        store.set(f"{topic}/found", found)
    try:
        store.wait([f"{topic}/found"], timedelta(seconds=deadline_s + _REPLY_S))
        found = store.get(f"{topic}/found").decode()
    except (RuntimeError, TimeoutError):
        return f"rank {ranks[0]} published no comparison within {deadline_s + _REPLY_S:g} s"
    if found and rank == 0:  # it raises this text and ends, and the store may end with it
        others = [index for index in range(1, len(ranks)) if index not in silent]
        silent_ranks(store, [f"{topic}/{index}/read" for index in others], _REPLY_S)
    elif found:
        with suppress(RuntimeError):
            store.set(f"{topic}/{rank}/read", "")
    return found


def differences(facts: Mapping[int, Mapping[str, str]]) -> str:
    """Return the differences as `key: 2 on rank 0-2, 4 on rank 3; ...`; empty without a difference."""
    keys = {key for of_rank in facts.values() for key in of_rank}
    texts = []
    for key in sorted(keys):
        values: dict[str, list[int]] = {}
        for rank, of_rank in facts.items():
            values.setdefault(of_rank.get(key, "not set"), []).append(rank)
        if len(values) > 1:
            found = [f"{value} on rank {ranks_text(having)}" for value, having in values.items()]
            texts.append(f"{key}: {_listed(', ', found)}")
    return _listed("; ", texts)


def ranks_text(ranks: Iterable[int]) -> str:
    """Return `0-2, 5` for 0, 1, 2, 5; of more than eight runs the first ones and the number of the other ranks."""
    # In a run, the difference between a number and its place is constant.
    groups = itertools.groupby(enumerate(sorted(ranks)), key=lambda numbered: numbered[1] - numbered[0])
    runs = [[number for _, number in group] for _, group in groups]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return _listed(", ", texts, sum(map(len, runs[_MOST:])))


def _listed(separator: str, texts: list[str], num_more: int | None = None) -> str:
    """Join the first texts; name the number of the others."""
    if len(texts) <= _MOST:
        return separator.join(texts)
    return f"{separator.join(texts[:_MOST])}{separator}and {num_more or len(texts) - _MOST} more"
