"""The cost model against times worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_overlap.autotune.cost_model import CostModel
from megatron_overlap.config.cluster import ClusterProfile
from tests.tools.simulate.machines import machine, number, profile


def with_gemm(**changes: object) -> CostModel:
    tree = profile(launch_us=5.0).model_dump(by_alias=True)
    tree["device"]["gemm"].update(changes)
    return CostModel(ClusterProfile.model_validate(tree))


def test_a_gemm_is_its_operations_over_the_rate() -> None:
    # 2 * 1000 * 1000 * 500 operations at 1 TFLOP/s are 1000 us.
    assert machine().gemm_us(1000, 1000, 500) == pytest.approx(1000.0)
    assert machine(launch_us=7.0).gemm_us(1000, 1000, 500) == pytest.approx(1007.0)
    assert machine(launch_us=7.0).gemm_us(0, 1000, 500) == 0.0


def test_a_wave_that_is_not_full_takes_as_long_as_one_that_is() -> None:
    model = with_gemm(processors=10, tiles=[{"rows": 100, "columns": 100}])
    wave = 2.0 * 100 * 100 * 500 * 10 / 1e12 * 1e6
    assert model.gemm_us(100, 100, 500) == pytest.approx(wave + 5)  # one tile of ten
    assert model.gemm_us(1000, 100, 500) == pytest.approx(wave + 5)  # ten
    assert model.gemm_us(1001, 100, 500) == pytest.approx(2 * wave + 5)  # eleven


def test_the_best_tile_is_taken_and_the_memory_is_a_roof() -> None:
    small = with_gemm(processors=10, tiles=[{"rows": 100, "columns": 100}, {"rows": 10, "columns": 100, "rate": 0.5}])
    assert small.gemm_us(100, 100, 500) == pytest.approx(2.0 * 10 * 100 * 500 * 10 / 0.5e12 * 1e6 + 5)
    slow = machine(memory_gbps=1.0)
    # 2 bytes for each of 3 x 100 x 100 elements at 1000 bytes a microsecond.
    assert slow.gemm_us(100, 100, 100) == pytest.approx(60.0)


def test_a_table_of_rows_is_interpolated_over_the_logarithm() -> None:
    model = with_gemm(rows=[{"rows": 64, "rate": 0.5}, {"rows": 256, "rate": 1.0}])
    alone = machine()
    for rows, rate in ((1, 0.5), (64, 0.5), (128, 0.75), (256, 1.0), (4096, 1.0)):
        assert model.gemm_us(rows, 100, 100) == pytest.approx(alone.gemm_us(rows, 100, 100) / rate + 5)


def test_collectives_are_hops_and_their_part_of_the_bytes() -> None:
    model = machine(latency_us=3.0, launch_us=2.0)
    link = model.link(4)
    # 3 hops of 3 us, 3/4 of 4000 bytes at 1000 bytes a microsecond, one launch.
    assert model.collective_us("all_gather", 4000, link) == pytest.approx(9 + 3 + 2)
    assert model.collective_us("all_reduce", 4000, link) == pytest.approx(2 * 12 + 2)
    assert model.collective_us("all_gather", 4000, model.link(1)) == 0.0
    assert model.message_us(4000, link) == pytest.approx(3 + 4)


def test_groups_that_leave_a_node_share_its_nics() -> None:
    model = machine(devices=8, nics=4, gbps=8.0)
    assert model.link(8).collective_rate == 8e3
    # One rank of each group in a node, eight groups, four NICs: half a NIC each.
    assert model.link(4, stride=8).copy_rate == pytest.approx(4e3)
    # Two ranks of each group in a node: the ring has two halves, its ranks' links are no limit.
    assert model.link(4, stride=4).collective_rate == pytest.approx(8e3)
    assert model.link(4, stride=4).copy_rate == pytest.approx(8e3)
    # Eight ranks on one node, four on the other: the ring has half of the NIC there.
    assert machine(devices=8, nics=1, gbps=8.0).link(12).collective_rate == pytest.approx(4e3)
    assert [model.link(size).per_node for size in (4, 8, 12, 16)] == [4, 8, 0, 8]


def test_a_ring_pays_for_every_node_it_crosses() -> None:
    model = machine(devices=4, nics=4, latency_us=2.0, between_us=10.0)
    # Three nodes of four: eleven hops, two of them between nodes.
    assert model.link(12).ring_latency_us == pytest.approx(9 * 2 + 2 * 10)
    assert model.link(12).latency_us == 10.0
    assert model.link(4).ring_latency_us == pytest.approx(3 * 2)


def test_a_wave_also_writes_its_tiles() -> None:
    tree = profile(memory_gbps=100.0).model_dump(by_alias=True)
    tree["device"]["gemm"].update(processors=10, tiles=[{"rows": 100, "columns": 100}])
    model = CostModel(ClusterProfile.model_validate(tree))
    multiplied = 2.0 * 100 * 100 * 500 * 10 / 1e12 * 1e6
    # Ten tiles of 100 x 100 elements of 2 bytes at 100 000 bytes a microsecond.
    assert model.gemm_us(1000, 100, 500) == pytest.approx(multiplied + 2.0)


def test_a_slower_reduce_scatter() -> None:
    tree = profile().model_dump(by_alias=True)
    tree["inside"]["reduce_scatter_gbps"] = number(0.5)
    model = CostModel(ClusterProfile.model_validate(tree))
    link = model.link(2)
    assert model.collective_us("reduce_scatter", 2000, link) == pytest.approx(2.0)
    assert model.collective_us("all_gather", 2000, link) == pytest.approx(1.0)
    assert model.collective_us("all_reduce", 2000, link) == pytest.approx(3.0)


def test_a_precision_the_profile_does_not_have_is_named() -> None:
    with pytest.raises(ValueError, match=r"train\.precision: fp16: the profile ideal"):
        CostModel(profile(), "fp16")


def test_moving_bytes_takes_compute_time() -> None:
    model = machine(host_us_per_mb=1000.0, copy=0.1)
    # 200 bytes a microsecond at 1000 us a megabyte take a fifth.
    assert model.compute_rate("copy", 200.0) == pytest.approx(0.7)
    assert model.compute_rate("collective", 200.0) == pytest.approx(0.8)
    assert model.compute_rate("copy", 1e9) == pytest.approx(0.05)


@settings(max_examples=50)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 5000), st.integers(0, 500))
def test_more_rows_never_take_less(m: int, n: int, k: int, more: int) -> None:
    model = with_gemm(processors=7, tiles=[{"rows": 128, "columns": 64}, {"rows": 64, "columns": 64, "rate": 0.8}])
    assert model.gemm_us(m + more, n, k) >= model.gemm_us(m, n, k) - 1e-9


def test_who_has_computed_for_longer_is_later() -> None:
    def late(*points: tuple[float, float]) -> CostModel:
        tree = profile().model_dump(by_alias=True)
        tree["contention"]["late"] = [{"computed_us": number(c), "late_us": number(us)} for c, us in points]
        return CostModel(ClusterProfile.model_validate(tree))

    assert late().late_us(1e6) == 0.0
    model = late((10.0, 4.0), (30.0, 6.0))
    assert [model.late_us(us) for us in (0.0, 5.0, 10.0, 20.0, 30.0, 50.0)] == pytest.approx([0, 2, 4, 5, 6, 8])
    with pytest.raises(ValueError, match=r"contention.late: .* ascending order of computation time"):
        late((30.0, 4.0), (10.0, 6.0))
