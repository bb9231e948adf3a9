"""enable, disable, report and the adapters of a session."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import megatron_overlap
from megatron_overlap import ConfigError, OverlapConfig, PatchError, Session
from megatron_overlap.counters import Site
from megatron_overlap.patching import PatchRefusedError, PatchWarning, RevertRefusedError
from megatron_overlap.patching.manifest import Manifest, ReviewedRelease
from megatron_overlap.session import Adapter
from tests.helpers.releases import run_python
from tests.patching.conftest import Packages


@pytest.fixture(autouse=True)
def _disable_after_test() -> Iterator[None]:
    yield
    megatron_overlap.disable()


def refused(manifest: Manifest) -> Manifest:
    return manifest.model_copy(update={"releases": {"0.1.0": ReviewedRelease(signature="()", digest="0" * 64)}})


def test_import_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, megatron_overlap as mo, megatron_overlap.patching.engine, megatron_overlap.session;"
        "mo.OverlapConfig(); mo.enable; mo.__version__;"
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'megatron')])"
    )
    done = run_python(["-c", code])
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_unknown_attribute_of_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'enabled'"):
        _ = megatron_overlap.enabled
    assert "enable" in dir(megatron_overlap)


def test_context_manager_enables_and_disables(packages: Packages) -> None:
    with megatron_overlap.enable(manifests=[packages.manifest("scale")]) as session:
        assert session.active
        assert packages.vendor.scale(2) == ("ours", 4)
    assert not session.active
    assert session.reason == "disabled"
    assert packages.vendor.scale(2) == 4
    session.disable()


def test_a_suspended_session_runs_the_stock_path_and_keeps_its_resources(packages: Packages) -> None:
    closed: list[str] = []
    with megatron_overlap.enable(manifests=[packages.manifest("scale")]) as session:
        session.add_close(lambda: closed.append("closed"))
        with session.suspended():
            assert packages.vendor.scale(2) == 4
        assert packages.vendor.scale(2) == ("ours", 4)
        assert not closed


def test_config_from_a_file_and_strict_argument(packages: Packages, tmp_path: Path) -> None:
    file = tmp_path / "overlap.yaml"
    file.write_text("overlap: {strict: false, tensor: {schedule: ring}}\n")
    session = megatron_overlap.enable(file, strict=True, manifests=[packages.manifest("scale")])
    assert session.config.tensor.schedule == "ring"
    assert session.config.strict
    assert session.counters.strict


def test_double_enable_is_refused_with_the_remedy(packages: Packages) -> None:
    first = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    with pytest.raises(PatchError, match=r"enabled already; call disable\(\)"):
        megatron_overlap.enable(manifests=[packages.manifest("Base.plain")])
    assert packages.vendor.scale(1) == ("ours", 2)
    first.disable()
    assert megatron_overlap.enable(manifests=[packages.manifest("scale")]).active


def test_enable_is_refused_where_only_the_patches_of_all_features_are_applied(packages: Packages) -> None:
    """As for variable-length attention: the checks of a second session would be refused."""
    config = OverlapConfig.model_validate({"tensor": {"method": "none"}, "varlen": {"method": "balanced"}})
    first = megatron_overlap.enable(config, manifests=[packages.manifest("scale", feature="consistency")])
    assert not first.active
    assert packages.vendor.scale(1) == ("ours", 2)
    with pytest.raises(PatchError, match=r"enabled already; call disable\(\)"):
        megatron_overlap.enable()


def test_off_switch(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_OVERLAP", "0")
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    assert not session.active
    assert "MEGATRON_OVERLAP=0" in session.report().render()
    assert packages.vendor.scale(2) == 4
    monkeypatch.setenv("MEGATRON_OVERLAP", "off")
    with pytest.raises(ConfigError, match="MEGATRON_OVERLAP: off: write 0"):
        megatron_overlap.enable(manifests=[])
    monkeypatch.setenv("MEGATRON_OVERLAP", "1")
    assert megatron_overlap.enable(manifests=[packages.manifest("scale")]).active


def test_a_feature_that_the_config_disables_is_not_replaced(packages: Packages) -> None:
    config = OverlapConfig.model_validate({"tensor": {"method": "none"}})
    session = megatron_overlap.enable(config, manifests=[packages.manifest("scale")])
    assert not session.active
    assert "asks for no feature" in session.reason
    assert session.report().patches == ()
    assert packages.vendor.scale(2) == 4


def test_a_refused_patch_warns_and_replaces_nothing(packages: Packages) -> None:
    manifests = [refused(packages.manifest("scale")), packages.manifest("Base.plain")]
    with pytest.warns(PatchWarning, match="scale: refused: .* has the signature") as caught:
        session = megatron_overlap.enable(manifests=manifests)
    assert all(warning.filename == __file__ for warning in caught)
    assert not session.active
    assert "the stock path runs everywhere" in session.reason
    assert packages.vendor.Base().plain(1)[0] == "vendor"
    assert [line.applied for line in session.report().patches] == [False, False]
    with pytest.raises(PatchRefusedError, match=r"scale: refused: .*strict to false"):
        megatron_overlap.enable(strict=True, manifests=manifests)


def test_a_refused_feature_does_not_refuse_others(packages: Packages) -> None:
    manifests = [refused(packages.manifest("scale")), packages.manifest("Base.plain", feature="data")]
    with pytest.warns(PatchWarning):
        session = megatron_overlap.enable(manifests=manifests)
    assert session.reason == "1 of Megatron's functions are replaced, 1 refused"
    assert session.active


def test_a_binding_by_value_in_another_package_warns(packages: Packages) -> None:
    packages.write("user_script", f"from {packages.vendor.__name__} import scale")
    with pytest.warns(PatchWarning, match="user_script:scale hold it by value"):
        session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    assert "user_script:scale" in session.report().render(width=200)


def test_disable_reverts_and_then_closes_in_reverse_order(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    seen: list[tuple[str, object]] = []
    session.add_close(lambda: seen.append(("first", packages.vendor.scale(1))))
    session.add_close(lambda: seen.append(("second", packages.vendor.scale(1))))
    megatron_overlap.disable()
    assert seen == [("second", 2), ("first", 2)]
    session.disable()
    assert len(seen) == 2


def test_failing_close_does_not_stop_the_others(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    closed: list[int] = []
    session.add_close(lambda: closed.append(1))
    session.add_close(lambda: 1 // 0)
    with pytest.raises(ExceptionGroup) as caught:
        session.disable()
    assert caught.group_contains(ZeroDivisionError)
    assert closed == [1]
    assert packages.vendor.scale(1) == 2


def test_a_failing_factory_closes_the_resources_of_the_others(packages: Packages) -> None:
    closed: list[int] = []

    def opens(original: object, session: Session) -> object:
        session.add_close(lambda: closed.append(1))
        return lambda *args: None

    packages.factories.opens = opens
    with pytest.raises(RuntimeError, match="no transport"):
        megatron_overlap.enable(
            manifests=[packages.manifest("scale", "opens"), packages.manifest("Base.plain", "fails")]
        )
    assert closed == [1]
    assert packages.vendor.scale(1) == 2
    with pytest.raises(PatchError, match="not enabled"):
        megatron_overlap.report()


def test_a_foreign_patch_on_top_keeps_the_session_active(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    closed: list[int] = []
    session.add_close(lambda: closed.append(1))
    ours, packages.vendor.scale = packages.vendor.scale, len
    with pytest.raises(RevertRefusedError, match="replaced after us by builtins.len"):
        megatron_overlap.disable()
    assert session.active
    assert closed == []
    assert megatron_overlap.report().active
    packages.vendor.scale = ours
    megatron_overlap.disable()
    assert closed == [1]


def test_report_counts_and_is_json(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    for _ in range(3):
        session.counters.overlapped("column", "qkv", "ag_gemm", "forward", 1024 * 1024)
    session.counters.fallback("row", "proj", "gemm_rs", "dgrad", "weight is frozen")
    session.counters.fallback("row", "proj", "gemm_rs", "dgrad", "weight is frozen")
    report = megatron_overlap.report()
    content = json.loads(json.dumps(report.as_dict()))
    assert content["totals"] == {"overlapped": 3, "fallbacks": 2, "bytes": 3 * 1024 * 1024}
    assert content["modules"][1] == {
        "kind": "row",
        "name": "proj",
        "op": "gemm_rs",
        "direction": "dgrad",
        "overlapped": 0,
        "bytes": 0,
        "fallbacks": {"weight is frozen": 2},
    }
    assert content["patches"][0]["applied"]
    assert content["features"]["tensor"] == "auto"
    assert content["versions"]["torch"]
    text = report.render()
    for piece in ("column qkv", "3.0", "2 x weight is frozen", "scale", "applies"):
        assert piece in text
    session.counters.overlapped("column", "qkv", "ag_gemm", "forward")
    assert report.sites[Site("column", "qkv", "ag_gemm", "forward")].overlapped == 3


class Recording(Adapter):
    """An adapter that records the calls of its session."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.calls: list[object] = []

    def close(self) -> None:
        self.calls.append("close")

    def drop(self) -> None:
        self.calls.append("drop")

    def step_ended(self) -> None:
        self.calls.append(("step ended", self.session.step))


def test_a_session_makes_an_adapter_once_and_calls_it(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[packages.manifest("scale")])
    assert session.find(Recording) is None
    adapter = session.adapter(Recording)
    assert session.adapter(Recording) is adapter
    assert session.find(Recording) is adapter
    session.next_step()
    session.next_step(5)
    assert session.step == 5
    session.drop_adapters()
    session.disable()
    assert adapter.calls == [
        ("step ended", 0),
        ("step ended", 1),
        "drop",
        "close",
    ]


def test_a_removed_adapter_is_made_again() -> None:
    session = Session(OverlapConfig())
    first = session.adapter(Recording)
    session.remove(Recording)
    second = session.adapter(Recording, lambda session: Recording(session))
    assert second is not first


def test_adapters_start_after_all_patches(packages: Packages) -> None:
    seen: list[object] = []

    class Starting(Adapter):
        def start(self) -> None:
            seen.append(packages.vendor.scale(1))

    def starts(original: object, session: Session) -> object:
        session.adapter(Starting)
        return lambda *args: "ours"

    packages.factories.starts = starts
    megatron_overlap.enable(manifests=[packages.manifest("scale", "starts")])
    assert seen == ["ours"]


def test_a_failing_start_reverts_all_patches(packages: Packages) -> None:
    class Failing(Adapter):
        def start(self) -> None:
            raise ZeroDivisionError

    def fails_at_start(original: object, session: Session) -> object:
        session.adapter(Failing)
        return lambda *args: "ours"

    packages.factories.fails_at_start = fails_at_start
    with pytest.raises(ZeroDivisionError):
        megatron_overlap.enable(manifests=[packages.manifest("scale", "fails_at_start")])
    assert packages.vendor.scale(1) == 2
    with pytest.raises(PatchError, match="not enabled"):
        megatron_overlap.report()


def test_patches_of_further_features_are_applied_once_and_reverted(packages: Packages) -> None:
    manifests = [packages.manifest("scale"), packages.manifest("Base.plain", feature="training")]
    session = megatron_overlap.enable(manifests=manifests)
    assert packages.vendor.Base().plain(1)[0] == "vendor"
    for _ in range(2):
        session.apply_patches({"training"}, required=True)
    assert packages.vendor.Base().plain(1)[0] == "ours"
    assert session.reason == "2 of Megatron's functions are replaced, 1 of them to overlap"
    assert [line.feature for line in session.report().patches if line.applied] == ["tensor", "training"]
    session.disable()
    assert packages.vendor.Base().plain(1)[0] == "vendor"


def test_a_required_patch_that_is_refused_raises(packages: Packages) -> None:
    session = megatron_overlap.enable(manifests=[refused(packages.manifest("Base.plain", feature="training"))])
    session.apply_patches({"tracing"})
    with pytest.raises(PatchRefusedError, match=r"Base\.plain: refused: .* has the signature"):
        session.apply_patches({"training"}, required=True)
    assert packages.vendor.Base().plain(1)[0] == "vendor"


def test_clean_enable_warns_nothing(packages: Packages) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        megatron_overlap.enable(manifests=[packages.manifest("scale")])
