"""Split micro-batches on machines whose times can be computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_overlap.tools.simulate.job import Job, Recompute, Split
from megatron_overlap.tools.simulate.layer import Layers
from megatron_overlap.tools.simulate.linear import LinearOverlap
from megatron_overlap.tools.simulate.split import _PartLayers, layer_passes
from tests.tools.simulate.machines import job, machine

SHARED: dict[str, Any] = {"tensor": 4, "micro_batch_size": 2}
SPLITS: tuple[Split, ...] = ("batch", "sequence")


def times(split_job: Job, **machine_changes: float) -> tuple[float, float]:
    forward, backward = layer_passes(split_job, machine(**machine_changes))
    return forward.time_us, backward.time_us


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("split", SPLITS)
def test_both_parts_have_the_work_of_the_layer(split: Split, recompute: Recompute) -> None:
    """Without messages, waves and launches the parts take as long as the layer: no operation is lost or doubled."""
    given = job(**SHARED, recompute=recompute)
    model = machine(gbps=1e12)
    layers = Layers(replace(given, tensor_overlap=LinearOverlap("stock")), model)
    expected = layers.forward.time_us, layers.backward.time_us
    assert times(replace(given, split=split), gbps=1e12) == pytest.approx(expected)


@pytest.mark.parametrize("split", SPLITS)
def test_only_the_first_and_last_messages_are_exposed(split: Split) -> None:
    """The first all-gather and the last reduce-scatter in forward; in backward the last weight gradient hides one."""
    given = job(**SHARED, split=split, num_layers=4)
    # Own rows of a part: 1,024 tokens of 1,024 elements of 2 bytes on 4 ranks, to 3 peers.
    message_us = 3 * 1024 / 4 * 1024 * 2 / 1e5
    # Parts of sequences are exchanged before and after the layers; a rank sends 3/4 of the rows of both parts.
    exchanges_us = 2 * 2 * message_us / 4 if split == "sequence" else 0.0
    forward, backward = layer_passes(given, machine(gbps=100.0))
    assert forward.tensor_us == pytest.approx((2 * message_us + exchanges_us) / 4)
    # The second part of a sequence is shorter, and is first in backward.
    rows = _PartLayers(given, machine()).first_rows() if split == "sequence" else 512
    assert 512 <= rows < 600
    last_us = (1024 - rows) / 512 * message_us
    assert backward.tensor_us == pytest.approx((last_us + exchanges_us) / 4)
    # Layers that are recomputed one by one hand nothing off; the recomputation is a forward.
    again = layer_passes(replace(given, recompute="full"), machine(gbps=100.0))
    assert again[0].tensor_us == pytest.approx(2 * message_us + exchanges_us)
    assert again[1].tensor_us == pytest.approx(2 * message_us + last_us + 2 * exchanges_us)
    selective = layer_passes(replace(given, recompute="selective"), machine(gbps=100.0))
    assert selective[0] == forward
    assert selective[1].tensor_us == pytest.approx(backward.tensor_us)


def test_a_slow_link_bounds_the_pass() -> None:
    """Eight messages of half of the rows in forward, twelve in backward: the input is gathered twice."""
    given = job(**SHARED, split="batch", num_layers=4)
    message_us = 3 * 1024 / 4 * 1024 * 2 / 1.0
    forward, backward = times(given, gbps=0.001)
    # Besides the messages only work at the ends of the block is exposed.
    assert forward == pytest.approx(8 * message_us, rel=0.01)
    assert backward == pytest.approx(12 * message_us, rel=0.01)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"split": "auto"}, "batch"),
        ({"split": "auto", "micro_batch_size": 1}, "sequence"),
        ({"split": "sequence"}, "sequence"),
        ({"split": "batch", "micro_batch_size": 1}, "none"),
        ({"split": "sequence", "context": 2}, "none"),
        ({"split": "sequence", "seq_length": 1020}, "sequence"),
        ({"split": "sequence", "seq_length": 4}, "none"),
        ({"split": "auto", "recompute": "full"}, "batch"),
        ({"split": "auto", "recompute": "selective"}, "batch"),
        ({"split": "auto", "recompute": "needed"}, "none"),
        ({"split": "auto", "sequence_parallel": False}, "none"),
        ({"split": "none"}, "none"),
    ],
)
def test_layouts_that_the_plugin_splits(changes: dict[str, Any], used: str) -> None:
    given = job(**{**SHARED, **changes})
    assert given.used_split == used
    if used == "none":
        assert layer_passes(given, machine()) == layer_passes(replace(given, split="none"), machine())


def test_auto_keeps_separate_layers_where_a_split_costs_more() -> None:
    given = job(**SHARED, tensor_overlap=LinearOverlap("stock"))
    model = machine(launch_us=1000.0, gbps=1e6)
    separate = layer_passes(given, model)
    assert layer_passes(replace(given, split="batch"), model)[0].time_us > separate[0].time_us
    assert layer_passes(replace(given, split="auto"), model) == separate
