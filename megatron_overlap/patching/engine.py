"""Plans patches, applies all of a plan or none, and reverts exactly."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any

from megatron_overlap.patching import PatchError, RevertRefusedError
from megatron_overlap.patching.manifest import NOT_APPLIED, Manifest, Verdict
from megatron_overlap.patching.planning import Finding, Plan, bindings_of, describe, plain_function, plan_patches


class Engine:
    """Owns the replaced attributes of this process from `apply` to `revert`."""

    def __init__(self, manifests: Iterable[Manifest]) -> None:
        self.manifests = tuple(manifests)
        self._applied: list[tuple[Finding, Any]] = []
        """Applied patches with their replacements."""

    @property
    def applied(self) -> list[str]:
        """The targets that are replaced now."""
        return [finding.manifest.target for finding, _ in self._applied]

    def plan(self, features: Collection[str] | None = None) -> Plan:
        """Examines the targets of `features`, or all, imports their modules, and changes nothing.

        A refused patch refuses the other patches of its feature: a feature was never tested in part.
        """
        found = Plan(plan_patches(each for each in self.manifests if features is None or each.feature in features))
        refused = {finding.manifest.feature: finding.manifest.target for finding in found.refused}
        return Plan(
            tuple(
                replace(finding, verdict=Verdict.REFUSED, reason=f"belongs together with {culprit}, refused")
                if finding.verdict not in NOT_APPLIED and (culprit := refused.get(finding.manifest.feature)) is not None
                else finding
                for finding in found.findings
            )
        )

    def apply(self, plan: Plan, session: Any) -> None:
        """Replaces every applicable target of `plan`; the factories get `session`.

        Raises PatchError if a target changed since it was planned. After a failure nothing is changed.
        """
        before = len(self._applied)
        ready = [(finding, self._make(finding, session)) for finding in plan.applicable]
        try:
            for finding, replacement in ready:
                self._replace(finding, replacement)
        except BaseException:
            self._undo(before)
            raise

    def revert(self) -> None:
        """Restores every original: the same object, in the same places, inherited where it was inherited.

        Attributes to which other code has assigned a replacement get the original as well. Raises RevertRefusedError if
        another package replaced one of our replacements; nothing is changed then.
        """
        self._refuse_foreign()
        undone = [(finding, ours) for finding, ours in self._undo(0) if finding.manifest.unchecked is None]
        for (finding, _), bindings in zip(undone, bindings_of(*(ours for _, ours in undone)), strict=True):
            for binding in bindings:
                setattr(binding.holder, binding.name, finding.original)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Inside the context the originals are back, and after it the same replacements. Raises as `revert`.

        Attributes to which other code has assigned a replacement keep it.
        """
        self._refuse_foreign()
        undone = self._undo(0)
        try:
            yield
        finally:
            for finding, replacement in reversed(undone):
                self._replace(finding, replacement)

    def _refuse_foreign(self) -> None:
        foreign = [
            f"{place}: replaced after us by {describe(place.read())}; undo that first"
            for finding, replacement in self._applied
            for place in finding.places
            if place.read() is not replacement
        ]
        if foreign:
            raise RevertRefusedError("; ".join(foreign))

    def _make(self, finding: Finding, session: Any) -> Any:
        manifest = finding.manifest
        if manifest.substitute is not None:
            return finding.made_by
        function = plain_function(finding.original)
        replacement = finding.made_by(function, session)
        if callable(function) and not callable(replacement):
            raise PatchError(f"{manifest.replacement}: made {replacement!r}, not a callable")
        if replacement is function:
            raise PatchError(f"{manifest.replacement}: returned the original that it must replace")
        if isinstance(replacement, FunctionType) and manifest.unchecked is None:
            # Tracebacks and `inspect` show the original's names; `__module__` names the module that replaced it.
            replacement.__name__, replacement.__qualname__ = function.__name__, function.__qualname__
            replacement.__module__ = finding.made_by.__module__
            replacement.__doc__ = function.__doc__
            replacement.__dict__["__wrapped__"] = function
        if isinstance(finding.original, staticmethod | classmethod):
            return type(finding.original)(replacement)
        return replacement

    def _replace(self, finding: Finding, replacement: Any) -> None:
        for place in finding.places:
            if place.read() is not finding.held_by(place):
                raise PatchError(f"{place}: changed to {describe(place.read())} since it was planned; plan again")
        self._applied.append((finding, replacement))
        for place in finding.places:
            setattr(place.holder, place.name, replacement)

    def _undo(self, keep: int) -> list[tuple[Finding, Any]]:
        """Restores the originals of all but the first `keep` applied patches, last applied first."""
        undone = []
        while len(self._applied) > keep:
            finding, replacement = self._applied.pop()
            undone.append((finding, replacement))
            # The last `_replace` may have failed before some places.
            for place in reversed([each for each in finding.places if each.read() is replacement]):
                if finding.held_by(place) is None:
                    delattr(place.holder, place.name)
                else:
                    setattr(place.holder, place.name, finding.original)
        return undone
