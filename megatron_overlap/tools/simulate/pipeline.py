"""Order of the forwards and backwards of a pipeline stage: 1F1B, with and without interleaving.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (arXiv 2104.04473), section 2.2;
the number of warm-up passes is that of Megatron-Core.
"""

from __future__ import annotations

from typing import NamedTuple


class Unit(NamedTuple):
    """One pass of one micro-batch through one model chunk of a stage."""

    backward: bool
    chunk: int
    microbatch: int


def order(stages: int, stage: int, chunks: int, microbatches: int) -> list[Unit]:
    """The units of one stage in order.

    Args:
        stages: number of pipeline stages.
        stage: index of the stage.
        chunks: model chunks per stage. With several, stage s has the chunks s, s + stages, ...
        microbatches: micro-batches per step; a multiple of `stages` with several chunks.

    Raises:
        ValueError: several chunks, and `microbatches` is not a multiple of `stages`.
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
    """Largest number of chunk activations that a stage saves at the same time."""
    live = most = 0
    for unit in order(stages, stage, chunks, microbatches):
        live += -1 if unit.backward else 1
        most = max(most, live)
    return most


def _unit(backward: bool, index: int, stages: int, chunks: int) -> Unit:
    if chunks == 1:
        return Unit(backward, 0, index)
    group, position = divmod(index, stages * chunks)
    chunk = position // stages
    return Unit(backward, chunks - 1 - chunk if backward else chunk, group * stages + position % stages)
