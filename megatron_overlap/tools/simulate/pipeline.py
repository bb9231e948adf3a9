"""The order in which a pipeline stage runs its forwards and backwards: 1F1B, plain and interleaved.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (arXiv 2104.04473), section 2.2;
number of warm-up passes as Megatron-Core counts them.
"""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """One pass of one micro-batch through one model chunk of a stage."""

    backward: bool
    chunk: int
    microbatch: int


def order(stages: int, stage: int, chunks: int, microbatches: int) -> list[Unit]:
    """What stage `stage` of `stages` runs, in order.

    Args:
        stages: pipeline stages.
        stage: which one.
        chunks: model chunks of each stage; with more than one, stage s holds the pieces s, s + stages, ...
        microbatches: of one step; with several chunks a multiple of `stages`.

    Raises:
        ValueError: several chunks, and `microbatches` no multiple of `stages`.
    """
    if chunks > 1 and microbatches % stages:
        raise ValueError(f"microbatches: {microbatches}: must be a multiple of the {stages} stages when interleaved")
    total = microbatches * chunks
    forwards = [_unit(False, index, stages, chunks) for index in range(total)]
    backwards = [_unit(True, index, stages, chunks) for index in range(total)]
    warm_up = stages - stage - 1
    if chunks > 1:
        warm_up = 2 * warm_up + (chunks - 1) * stages
    warm_up = min(warm_up, total)
    units = forwards[:warm_up]
    for index in range(total - warm_up):
        units += (forwards[warm_up + index], backwards[index])
    return units + backwards[total - warm_up :]


def in_flight(stages: int, stage: int, chunks: int, microbatches: int) -> int:
    """Most chunk activations that a stage holds at a time."""
    held = most = 0
    for unit in order(stages, stage, chunks, microbatches):
        held += -1 if unit.backward else 1
        most = max(most, held)
    return most


def _unit(backward: bool, index: int, stages: int, chunks: int) -> Unit:
    if chunks == 1:
        return Unit(backward, 0, index)
    group, place = divmod(index, stages * chunks)
    chunk = place // stages
    return Unit(backward, chunks - 1 - chunk if backward else chunk, group * stages + place % stages)
