"""The engine on packages that the test writes: it applies all patches or none, and reverts exactly."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
from megatron.core import package_info

from megatron_overlap.patching import PatchError, RevertRefusedError
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import Manifest, ReviewedRelease, Verdict
from megatron_overlap.patching.planning import Finding, bindings_of
from tests.patching.conftest import Packages

Snapshot = Callable[[object], Callable[[], bool]]


def only(engine: Engine) -> Finding:
    (finding,) = engine.plan().findings
    return finding


def applied(*manifests: Manifest) -> Engine:
    engine = Engine(manifests)
    engine.apply(engine.plan(), session=None)
    return engine


def test_replaces_and_restores_a_method(packages: Packages, snapshot: Snapshot) -> None:
    base = packages.vendor.Base
    same = snapshot(base)
    engine = applied(packages.manifest("Base.plain"))
    assert base().plain(3, 4, key=5) == ("ours", ("vendor", 3, (4,), {"key": 5}))
    assert packages.vendor.Derived().plain(1)[0] == "ours"
    assert engine.applied == [f"{packages.vendor.__name__}:Base.plain"]
    engine.revert()
    assert same()
    assert engine.applied == []


def test_packages_below_megatron_are_searched_for_their_own_objects_alone(packages: Packages) -> None:
    ours, theirs = packages.vendor.scale, functools.partial
    setattr(types, packages.vendor_name, ours)
    try:
        (found,) = bindings_of(ours)
        assert [str(binding) for binding in found] == [f"{packages.vendor.__name__}:scale"]
        found, held = bindings_of(ours, theirs)
        assert f"types:{packages.vendor_name}" in map(str, found)
        assert "functools:partial" in map(str, held)
    finally:
        delattr(types, packages.vendor_name)


def test_replacement_has_the_names_of_the_original_and_its_own_module(packages: Packages) -> None:
    original = packages.vendor.scale
    engine = applied(packages.manifest("scale"))
    replacement = packages.vendor.scale
    assert (replacement.__name__, replacement.__doc__) == ("scale", "Documented.")
    assert replacement.__wrapped__ is original
    assert replacement.__module__ == packages.factories.__name__
    engine.revert()


def test_inherited_attribute_is_deleted_again(packages: Packages, snapshot: Snapshot) -> None:
    derived, base = packages.vendor.Derived, packages.vendor.Base
    same = snapshot(derived), snapshot(base)
    engine = applied(packages.manifest("Derived.inherited"))
    assert "inherited" in vars(derived)
    assert derived().inherited(1) == ("ours", 2)
    assert base().inherited(1) == 2
    engine.revert()
    assert "inherited" not in vars(derived)
    assert all(check() for check in same)


@pytest.mark.parametrize(("name", "kind"), [("free", staticmethod), ("made", classmethod)])
def test_static_and_class_methods_keep_their_kind(packages: Packages, snapshot: Snapshot, name: str, kind: Any) -> None:
    base = packages.vendor.Base
    same, stock = snapshot(base), getattr(base, name)(7)
    engine = applied(packages.manifest(f"Base.{name}"))
    assert type(vars(base)[name]) is kind
    assert getattr(base, name)(7) == ("ours", stock)
    engine.revert()
    assert same()


def test_listed_by_value_bindings_are_replaced_with_the_target(packages: Packages, snapshot: Snapshot) -> None:
    user = packages.write(f"{packages.vendor_name}.user", f"from {packages.vendor.__name__} import scale as doubled")
    listed = f"{user.__name__}:doubled"
    same = snapshot(user), snapshot(packages.vendor)
    engine = applied(packages.manifest("scale", also_bound=(listed, f"{packages.vendor_name}.never_imported:scale")))
    assert user.doubled(2) == packages.vendor.scale(2) == ("ours", 4)
    engine.revert()
    assert all(check() for check in same)


def test_unlisted_binding_in_the_same_package_is_refused(packages: Packages) -> None:
    user = packages.write(f"{packages.vendor_name}.user", f"from {packages.vendor.__name__} import scale")
    finding = only(Engine([packages.manifest("scale")]))
    assert finding.verdict is Verdict.REFUSED
    assert f"{user.__name__}:scale holds it by value" in finding.reason


def test_binding_in_a_module_that_a_replacement_imports_is_found(packages: Packages) -> None:
    """The search covers modules that planning imports, also for patches that are planned before."""
    user = packages.write(f"{packages.vendor_name}.user", f"from {packages.vendor.__name__} import scale")
    other = packages.write(
        "other_factories", f"import {user.__name__}\nplain = outer = lambda original, session: original"
    )
    first = packages.manifest("scale")
    second = packages.manifest("Base.plain").model_copy(update={"replacement": f"{other.__name__}:plain"})
    for name in (user.__name__, other.__name__):
        del sys.modules[name]
    refused, _ = Engine([first, second]).plan().findings
    assert f"{user.__name__}:scale holds it by value" in refused.reason


def test_binding_in_a_class_is_found(packages: Packages) -> None:
    source = f"from {packages.vendor.__name__} import Base\nclass Thief:\n    taken = Base.plain\n"
    packages.write(f"{packages.vendor_name}.thief", source)
    assert "thief:Thief.taken holds it by value" in only(Engine([packages.manifest("Base.plain")])).reason


def test_binding_in_another_package_is_reported(packages: Packages) -> None:
    packages.write("stranger", f"from {packages.vendor.__name__} import scale")
    finding = only(Engine([packages.manifest("scale")]))
    assert finding.verdict is Verdict.APPLIES
    assert finding.stale == ("stranger:scale",)


def test_listed_binding_that_holds_something_else_is_refused(packages: Packages) -> None:
    user = packages.write(f"{packages.vendor_name}.user", "def scale(value, factor=2):\n    return 0\n")
    finding = only(Engine([packages.manifest("scale", also_bound=(f"{user.__name__}:scale",))]))
    assert finding.verdict is Verdict.REFUSED
    assert f"holds {user.__name__}.scale" in finding.reason


def test_search_imports_no_lazy_module_and_reads_no_proxy(packages: Packages) -> None:
    class Lazy(types.ModuleType):
        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(f"{name} was read")

    class Proxy:
        @property
        def __class__(self) -> Any:
            raise AssertionError("__class__ was read")

    packages.factories.proxy = Proxy()
    engine = Engine([packages.manifest("scale")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "lazy_one", Lazy("lazy_one"))
        assert only(engine).verdict is Verdict.APPLIES


def test_revert_restores_replacements_that_were_imported_by_value(packages: Packages) -> None:
    original = packages.vendor.scale
    engine = applied(packages.manifest("scale"))
    late = packages.write("late_comer", f"from {packages.vendor.__name__} import scale")
    engine.revert()
    assert late.scale is original


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_earlier_foreign_patch_is_refused_and_named(packages: Packages, wrapped: bool) -> None:
    manifest = packages.manifest("Base.plain")
    original = packages.vendor.Base.plain

    def foreign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, value, *args, **kwargs)

    theirs = functools.wraps(original)(foreign) if wrapped else foreign
    packages.vendor.Base.plain = theirs
    finding = only(Engine([manifest]))
    assert finding.verdict is Verdict.REFUSED
    assert f"already replaced by {__name__}" in finding.reason
    assert "foreign" in finding.reason
    assert __file__ in finding.reason
    assert packages.vendor.Base.plain is theirs


def test_another_function_of_the_same_file_is_foreign_too(packages: Packages) -> None:
    manifest = packages.manifest("Base.plain")
    packages.vendor.Base.plain = packages.vendor.scale
    assert "Base.plain was already replaced by" in only(Engine([manifest])).reason


def test_foreign_callable_without_code_is_refused(packages: Packages) -> None:
    manifest = packages.manifest("scale")
    packages.vendor.scale = functools.partial(max, 3)
    assert "already replaced by functools.partial" in only(Engine([manifest])).reason


def test_class_replaced_by_a_foreign_subclass_is_refused(packages: Packages) -> None:
    manifest = packages.manifest("Base.plain")

    class Theirs(packages.vendor.Base):  # type: ignore[name-defined,misc]
        pass

    packages.vendor.Base = Theirs
    finding = only(Engine([manifest]))
    assert finding.verdict is Verdict.REFUSED
    assert "Theirs: another package replaced the class" in finding.reason


def test_foreign_patch_after_us_stops_revert_and_nothing_changes(packages: Packages) -> None:
    base = packages.vendor.Base
    stock = base.plain
    engine = applied(packages.manifest("Base.inherited"), packages.manifest("Base.plain"))
    ours = base.plain, base.inherited

    def theirs(self: Any, value: Any) -> Any:
        return ours[0](self, value)

    base.plain = theirs
    with pytest.raises(RevertRefusedError, match=r"Base\.plain: replaced after us by .*theirs"):
        engine.revert()
    assert (base.plain, base.inherited) == (theirs, ours[1])
    assert len(engine.applied) == 2
    base.plain = ours[0]
    engine.revert()
    assert base.plain is stock


def test_originals_run_while_suspended_and_the_same_replacements_after(packages: Packages, snapshot: Snapshot) -> None:
    base, derived = packages.vendor.Base, packages.vendor.Derived
    same, same_derived = snapshot(base), snapshot(derived)
    engine = applied(packages.manifest("Base.plain"), packages.manifest("Derived.inherited"))
    ours = base.plain, derived.inherited
    with engine.suspended():
        assert same()
        assert same_derived()
        assert engine.applied == []
    assert (base.plain, derived.inherited) == ours
    with pytest.raises(ZeroDivisionError), engine.suspended():
        raise ZeroDivisionError
    assert (base.plain, derived.inherited) == ours
    engine.revert()
    assert same()
    assert same_derived()


def test_foreign_patch_after_us_refuses_to_suspend(packages: Packages) -> None:
    base = packages.vendor.Base
    engine = applied(packages.manifest("Base.plain"))
    ours, base.plain = base.plain, len
    with pytest.raises(RevertRefusedError, match=r"Base\.plain: replaced after us by .*len"), engine.suspended():
        pass
    assert base.plain is len
    base.plain = ours
    engine.revert()


def test_failure_midway_restores_the_replaced_attributes(packages: Packages) -> None:
    source = """
    class Guard(type):
        locked = False
        def __setattr__(cls, name, value):
            if cls.locked and name == "second":
                raise PermissionError("locked")
            super().__setattr__(name, value)

    class Careful(metaclass=Guard):
        def first(self):
            return 1
        def second(self):
            return 2
    """
    module = packages.write(f"{packages.vendor_name}.careful", source)
    manifests = [packages.manifest(f"Careful.{name}", module=module) for name in ("first", "second")]
    first, second = module.Careful.first, module.Careful.second
    module.Guard.locked = True
    engine = Engine(manifests)
    plan = engine.plan()
    with pytest.raises(PermissionError):
        engine.apply(plan, session=None)
    assert (module.Careful.first, module.Careful.second) == (first, second)
    assert engine.applied == []
    module.Guard.locked = False
    engine.apply(plan, session=None)
    assert len(engine.applied) == 2
    engine.revert()


@pytest.mark.parametrize(("factory", "message"), [("fails", "no transport"), ("lazy", "returned the original")])
def test_failing_factory_changes_nothing(packages: Packages, snapshot: Snapshot, factory: str, message: str) -> None:
    same = snapshot(packages.vendor.Base)
    engine = Engine([packages.manifest("Base.plain"), packages.manifest("Base.inherited", factory)])
    plan = engine.plan()
    with pytest.raises((RuntimeError, PatchError), match=message):
        engine.apply(plan, session=None)
    assert same()


def test_factories_get_the_session(packages: Packages) -> None:
    packages.factories.keeps = lambda original, session: lambda *args: session
    engine = Engine([packages.manifest("scale", "keeps")])
    session = object()
    engine.apply(engine.plan(), session)
    assert packages.vendor.scale(1) is session
    engine.revert()


def test_target_changed_between_plan_and_apply(packages: Packages) -> None:
    engine = Engine([packages.manifest("Base.inherited"), packages.manifest("Base.plain")])
    plan = engine.plan()
    inherited, theirs = packages.vendor.Base.inherited, lambda self, value: value
    packages.vendor.Base.plain = theirs
    with pytest.raises(PatchError, match=r"Base\.plain: changed to .* since it was planned"):
        engine.apply(plan, session=None)
    assert packages.vendor.Base.inherited is inherited
    assert packages.vendor.Base.plain is theirs


def test_patches_of_further_features_may_be_applied_later(packages: Packages, snapshot: Snapshot) -> None:
    same = snapshot(packages.vendor), snapshot(packages.vendor.Base)
    engine = Engine([packages.manifest("scale"), packages.manifest("Base.plain", "outer", feature="data")])
    engine.apply(engine.plan({"tensor"}), session=None)
    assert packages.vendor.Base().plain(1)[0] == "vendor"
    engine.apply(engine.plan({"data"}), session=None)
    assert packages.vendor.Base().plain(1)[0] == "ours"
    engine.revert()
    assert all(check() for check in same)


def test_failure_of_a_later_apply_keeps_the_patches_of_the_earlier_one(packages: Packages) -> None:
    broken = packages.manifest("Base.plain", feature="data").model_copy(update={"also_bound": []})
    engine = Engine([packages.manifest("scale"), broken])
    engine.apply(engine.plan({"tensor"}), session=None)
    plan = engine.plan({"data"})
    packages.vendor.Base.plain = lambda self, value: value
    with pytest.raises(PatchError, match="since it was planned"):
        engine.apply(plan, session=None)
    assert engine.applied == [f"{packages.vendor.__name__}:scale"]
    assert packages.vendor.scale(2) == ("ours", 4)
    engine.revert()


def unchecked(packages: Packages, qualname: str, **keys: str) -> Manifest:
    """A manifest without reviewed releases."""
    content = {"target": f"{packages.vendor.__name__}:{qualname}", "feature": "tensor", "why": "a target for the tests"}
    return Manifest.model_validate({**content, "unchecked": "the source of this target is not compared", **keys})


def test_an_unchecked_patch_replaces_one_attribute_of_any_kind(packages: Packages, snapshot: Snapshot) -> None:
    packages.vendor.table = {"any": "object"}
    packages.factories.other_table = {"another": "object"}
    same = snapshot(packages.vendor), snapshot(packages.vendor.Derived)
    user = packages.write(f"{packages.vendor_name}.user", f"from {packages.vendor.__name__} import scale")
    ours = packages.factories.__name__
    engine = applied(
        unchecked(packages, "table", substitute=f"{ours}:other_table"),
        unchecked(packages, "scale", substitute=f"{ours}:outer"),
        unchecked(packages, "Derived.inherited", replacement=f"{ours}:outer"),
    )
    assert packages.vendor.table == {"another": "object"}
    assert packages.vendor.scale is packages.factories.outer
    assert user.scale(2) == 4, "a holder by value keeps the original"
    assert packages.vendor.Derived().inherited(1) == ("ours", 2)
    engine.revert()
    assert packages.factories.outer.__name__ == "outer", "the substitute's own module keeps it"
    assert all(check() for check in same)


def test_second_apply_is_refused(packages: Packages) -> None:
    engine = Engine([packages.manifest("scale")])
    plan = engine.plan()
    engine.apply(plan, session=None)
    assert only(engine).verdict is Verdict.REFUSED
    with pytest.raises(PatchError, match="since it was planned; plan again"):
        engine.apply(plan, session=None)
    assert packages.vendor.scale(1) == ("ours", 2)
    engine.revert()


def test_a_patch_of_a_package_that_is_not_installed_is_absent_and_refuses_nothing(packages: Packages) -> None:
    absent = packages.manifest("Base.plain").model_copy(update={"requires": "not_installed.module"})
    other = packages.manifest("scale")
    engine = Engine([absent, other])
    plan = engine.plan()
    assert [finding.verdict for finding in plan.findings] == [Verdict.ABSENT, Verdict.APPLIES]
    assert plan.findings[0].reason == "needs not_installed"
    engine.apply(plan, session=None)
    assert engine.applied == [other.target]
    engine.revert()
    present = absent.model_copy(update={"requires": packages.vendor.__name__})
    assert only(Engine([present])).verdict is Verdict.APPLIES


def test_a_patch_is_absent_in_a_release_without_its_target(packages: Packages) -> None:
    gone = f"{packages.vendor.__name__}:Base.gone"
    release = ".".join(map(str, (package_info.MAJOR, package_info.MINOR, package_info.PATCH)))
    update = {"target": gone, "missing_from": [release]}
    finding = only(Engine([packages.manifest("Base.plain").model_copy(update=update)]))
    assert (finding.verdict, finding.reason) == (Verdict.ABSENT, f"{release} has no Base.gone")


def test_a_refused_patch_refuses_its_feature_only(packages: Packages) -> None:
    missing = packages.manifest("Base.plain").model_copy(update={"target": f"{packages.vendor.__name__}:Base.gone"})
    other = packages.manifest("scale", feature="data")
    engine = Engine([packages.manifest("Base.inherited"), missing, other])
    plan = engine.plan()
    assert [finding.verdict for finding in plan.findings] == [Verdict.REFUSED, Verdict.REFUSED, Verdict.APPLIES]
    assert "belongs together with" in plan.findings[0].reason
    assert "Base.gone, refused" in plan.findings[0].reason
    engine.apply(plan, session=None)
    assert engine.applied == [other.target]
    engine.revert()
    assert len(engine.plan({"data"}).findings) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "no_such_package.layers:f"}, "no_such_package.layers cannot be imported"),
        ({"target": "{vendor}:Gone.plain"}, "has no Gone.plain"),
        ({"target": "{vendor}:gone"}, "has no gone"),
        ({"replacement": "no_such_package:f"}, "the replacement no_such_package:f cannot be imported"),
        ({"replacement": "{ours}:gone"}, "gone cannot be imported: module"),
        ({"target": "math:hypot"}, "source of math is not readable"),
    ],
)
def test_a_missing_module_or_attribute_is_named(packages: Packages, change: dict[str, str], message: str) -> None:
    names = {"vendor": packages.vendor.__name__, "ours": packages.factories.__name__}
    update = {key: value.format(**names) for key, value in change.items()}
    finding = only(Engine([packages.manifest("scale").model_copy(update=update)]))
    assert finding.verdict is Verdict.REFUSED
    assert message in finding.reason


def test_an_unreviewed_signature_is_refused(packages: Packages) -> None:
    read = ReviewedRelease(signature="(value)", digest="0" * 64)
    finding = only(Engine([packages.manifest("scale").model_copy(update={"releases": {"1.0.0": read}})]))
    assert finding.verdict is Verdict.REFUSED
    assert "has the signature (value, factor=2), and only (value) was reviewed" in finding.reason


def test_an_unreviewed_body_applies_unreviewed(packages: Packages) -> None:
    read = ReviewedRelease(signature="(value, factor=2)", digest="0" * 64)
    finding = only(Engine([packages.manifest("scale").model_copy(update={"releases": {"1.0.0": read}})]))
    assert finding.verdict is Verdict.UNREVIEWED
    assert "differs from the reviewed release 1.0.0 in scale" in finding.reason


def test_a_change_in_a_symbol_it_relies_on_applies_unreviewed(packages: Packages) -> None:
    relied = f"{packages.vendor.__name__}:Base.inherited"
    manifest = packages.manifest("scale", relies_on=(relied,))
    assert only(Engine([manifest])).verdict is Verdict.APPLIES
    release = manifest.releases["1.0.0"].model_copy(update={"relies_on": {relied: "0" * 64}})
    finding = only(Engine([manifest.model_copy(update={"releases": {"1.0.0": release}})]))
    assert finding.verdict is Verdict.UNREVIEWED
    assert "the reviewed release 1.0.0 in Base.inherited" in finding.reason
