"""Plans all patches, applies all or none, reverts exactly."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any

from megatron_overlap.patching.bindings import Binding, bindings_of
from megatron_overlap.patching.compatibility import Verdict
from megatron_overlap.patching.errors import PatchError, RevertRefusedError
from megatron_overlap.patching.manifest import Manifest
from megatron_overlap.patching.planning import Finding, Plan, look, plain_function, who


@dataclass(frozen=True)
class _Applied:
    finding: Finding
    replacement: Any
    changed: tuple[Binding, ...]


class Engine:
    """Owns the replaced attributes of this process from `apply` to `revert`."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.manifests = tuple(manifests)
        self._applied: list[_Applied] = []

    @property
    def applied(self) -> list[str]:
        """The targets that are replaced now."""
        return [each.finding.manifest.target for each in self._applied]

    def plan(self, features: Collection[str] | None = None) -> Plan:
        """Looks at every target, importing its module, and changes nothing.

        A refused patch takes the others of its feature with it: nobody tested half a feature.

        Args:
            features: plan only the patches of these; default all.
        """
        findings = look(each for each in self.manifests if features is None or each.feature in features)
        refused = {
            finding.manifest.feature: finding.manifest.target
            for finding in findings
            if finding.verdict is Verdict.REFUSED
        }
        return Plan(
            tuple(
                replace(finding, verdict=Verdict.REFUSED, reason=f"belongs together with {culprit}, refused")
                if finding.verdict is not Verdict.REFUSED
                and (culprit := refused.get(finding.manifest.feature)) is not None
                else finding
                for finding in findings
            )
        )

    def apply(self, plan: Plan, session: Any) -> None:
        """Replaces every applicable target of `plan`; after any failure everything is as before.

        Args:
            plan: a fresh one; a target that changed since is a failure.
            session: handed to the factories.

        Raises:
            PatchError: patches are applied already, or a target changed since it was planned.
        """
        if self._applied:
            raise PatchError(f"{', '.join(self.applied)}: applied already; revert first")
        ready = [(finding, self._make(finding, session)) for finding in plan.applicable]
        try:
            for finding, replacement in ready:
                self._replace(finding, replacement)
        except BaseException:
            self.revert()
            raise

    def revert(self) -> list[str]:
        """Puts every original back: the same object, in the same places, inherited where it was inherited.

        Modules that imported a replacement by value while it was in place get the original as well.

        Returns:
            The places outside the plan that held a replacement.

        Raises:
            RevertRefusedError: somebody replaced one of our replacements; nothing is changed then.
        """
        foreign = [
            f"{site}: replaced after us by {who(site.read())}; have that undone first"
            for applied in self._applied
            for site in applied.changed
            if site.read() is not applied.replacement
        ]
        if foreign:
            raise RevertRefusedError("; ".join(foreign))
        undone = []
        while self._applied:
            undone.append(self._applied.pop())
            self._restore(undone[-1])
        late = []
        for applied, bindings in zip(undone, bindings_of(*(one.replacement for one in undone)), strict=True):
            for binding in bindings:
                setattr(binding.holder, binding.name, applied.finding.original)
                late.append(str(binding))
        return late

    def _make(self, finding: Finding, session: Any) -> Any:
        assert finding.factory is not None
        function = plain_function(finding.original)
        replacement = finding.factory(function, session)
        if not callable(replacement):
            raise PatchError(f"{finding.manifest.replacement}: made {replacement!r}, not a callable")
        if replacement is function:
            raise PatchError(f"{finding.manifest.replacement}: gave back the original it was to replace")
        if isinstance(replacement, FunctionType):
            # Looks like the original to tracebacks and inspect, except for the module: others can see who is here.
            replacement.__name__, replacement.__qualname__ = function.__name__, function.__qualname__
            replacement.__module__ = finding.factory.__module__
            replacement.__doc__ = function.__doc__
            replacement.__dict__.setdefault("__wrapped__", function)
        if isinstance(finding.original, staticmethod | classmethod):
            return type(finding.original)(replacement)
        return replacement

    def _replace(self, finding: Finding, replacement: Any) -> None:
        site = finding.site
        assert site is not None
        places = (site, *finding.rebind)
        expected = [finding.original if finding.own else None, *(finding.original for _ in finding.rebind)]
        for place, before in zip(places, expected, strict=True):
            if place.read() is not before:
                raise PatchError(f"{place}: changed to {who(place.read())} since it was planned; plan again")
        changed: list[Binding] = []
        try:
            for place in places:
                setattr(place.holder, place.name, replacement)
                changed.append(place)
        finally:
            if changed:
                self._applied.append(_Applied(finding, replacement, tuple(changed)))

    def _restore(self, applied: _Applied) -> None:
        site = applied.finding.site
        for place in reversed(applied.changed):
            if place is site and not applied.finding.own:
                delattr(place.holder, place.name)
            else:
                setattr(place.holder, place.name, applied.finding.original)
