"""Cluster profiles: those that come with the package, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_overlap.config import ConfigError
from megatron_overlap.config.cluster import load_cluster_profile, profile_folder, with_hosts
from megatron_overlap.tools.compare.flops import HALF_TFLOPS

DEVICES = {
    "a100_nvlink": "A100",
    "a100_pcie": "A100",
    "a800": "A800",
    "grand_teton": "H100",
    "h100_dgx": "H100",
    "h200": "H200",
    "h800": "H800",
    "l20_pcie": "L20",
}
PROFILES = sorted(path.stem for path in profile_folder().glob("*.yaml"))


@pytest.mark.parametrize("name", PROFILES)
def test_shipped_profiles_are_whole_and_agree_with_the_table_of_peaks(name: str) -> None:
    profile = load_cluster_profile(name)
    assert profile.name == name
    if name in DEVICES:
        assert profile.peak_tflops("bf16") == HALF_TFLOPS[DEVICES[name]]
    for link in (profile.inside, profile.between):
        assert link.collective_gbps.value <= link.copy_gbps.value * 1.05


def test_every_machine_asked_for_is_there() -> None:
    assert set(DEVICES) | {"commfuse", "netlab"} == set(PROFILES)


def refused(tmp_path: Path, text: str) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(f"base: {Path('configs/clusters/h800.yaml').resolve()}\nname: mine\n{text}")
    with pytest.raises(ConfigError) as caught:
        load_cluster_profile(str(path))
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(str(path), "mine.yaml")


def test_a_number_without_a_source_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, "inside:\n  copy_gbps: 100\n")
    assert message.startswith("mine.yaml: inside.copy_gbps: 100: give a section with keys such as value, source")
    message = refused(tmp_path, "inside:\n  copy_gbps: {value: 100, source: ' '}\n")
    assert message.startswith("mine.yaml: inside.copy_gbps.source: ")


def test_wrong_keys_and_values_are_named(tmp_path: Path) -> None:
    assert "did you mean inside?" in refused(tmp_path, "insid: {}\n")
    assert "contention.copy.value: 2" in refused(tmp_path, "contention:\n  copy: {value: 2, source: x}\n")
    rows = "device:\n  gemm:\n    rows: [{rows: 64, rate: 0.5}, {rows: 32, rate: 0.4}]\n"
    assert "give the points in ascending order of rows" in refused(tmp_path, rows)


def test_an_unknown_profile_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean h100_dgx, or give a YAML file"):
        load_cluster_profile("h100dgx")


def test_hosts_set_the_rate_of_netlab_alone() -> None:
    lab = load_cluster_profile("netlab")
    lab = lab.model_copy(update={"between": lab.between.model_copy(update={"host": None})})
    fast = with_hosts(lab, 4.0, 2)
    assert fast.between.copy_gbps.value == pytest.approx(4 * lab.between.copy_gbps.value)
    assert fast.between.reduce_scatter_gbps is not None
    assert lab.between.reduce_scatter_gbps is not None
    assert fast.between.reduce_scatter_gbps.value == pytest.approx(4 * lab.between.reduce_scatter_gbps.value)
    assert fast.devices_per_node == 2
    other = load_cluster_profile("h800")
    assert with_hosts(other, 4.0, 2) is other


def test_what_the_hosts_do_themselves_is_not_faster_on_a_faster_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    rates = "\n".join(
        f"      {name}: {{value: 0.25, source: x}}"
        for name in ("copy_gbps", "collective_gbps", "reduce_scatter_gbps", "all_reduce_gbps")
    )
    netlab = Path("configs/clusters/netlab.yaml").resolve()
    path.write_text(
        f"base: {netlab}\nbetween:\n  copy_gbps: {{value: 0.1, source: x}}\n"
        f"  collective_gbps: {{value: 0.1, source: x}}\n  host:\n{rates}\n"
    )
    lab = load_cluster_profile(str(path))
    rates = [with_hosts(lab, gbps, 1).between.copy_gbps.value for gbps in (0.5, 1.0, 2.0, 4.0)]
    assert rates == pytest.approx([0.05, 0.1, 0.2, 0.25])
