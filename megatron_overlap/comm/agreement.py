"""All ranks of a group decide alike, or none does: whether a transport may be used, found out with a deadline."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist


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
