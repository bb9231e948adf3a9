"""Decides whether a patch fits a release, from its manifest and the source text of that release."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from megatron_overlap.patching.manifest import Manifest, ReviewedRelease
from megatron_overlap.patching.source import (
    Definition,
    SourceTree,
    Target,
    definitions,
    megatron_release,
)


class Verdict(StrEnum):
    """Whether a patch may be applied."""

    APPLIES = "applies"
    UNREVIEWED = "applies unreviewed"
    REFUSED = "refused"
    ABSENT = "absent"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    reason: str


_OPTIONAL_PACKAGE = "megatron.training"
"""The training loop; some wheels of megatron-core lack it."""

NOT_COMPARED = Judgement(Verdict.APPLIES, "not compared")
"""The judgement of every patch with `unchecked`."""


def judge(manifest: Manifest, definition: Definition, tree: SourceTree) -> Judgement:
    """Compares a definition, and the symbols that the replacement relies on, with the reviewed releases."""
    here = megatron_release(tree) or "this version"
    same_signature = {
        name: release for name, release in manifest.releases.items() if release.signature == definition.signature
    }
    if not same_signature:
        known = ", ".join(sorted({release.signature for release in manifest.releases.values()}))
        return Judgement(
            Verdict.REFUSED,
            f"{here} has the signature {definition.signature}, and only {known} was reviewed;"
            " use a reviewed release, or a newer megatron-overlap",
        )
    changed = {name: _changed(manifest, release, definition, tree) for name, release in same_signature.items()}
    equal = [name for name, names in changed.items() if not names]
    if here in equal:
        return Judgement(Verdict.APPLIES, f"{here} was reviewed")
    if equal:
        return Judgement(Verdict.APPLIES, f"{here} has the same source as {equal[-1]}, which was reviewed")
    nearest = min(reversed(changed), key=lambda name: len(changed[name]))
    if here in changed:
        difference = f"this is not the reviewed {here}: it differs in {', '.join(changed[here])}"
    else:
        difference = (
            f"{here} was not reviewed; it differs from {nearest}, the nearest reviewed release,"
            f" in {', '.join(changed[nearest])}"
        )
    return Judgement(Verdict.UNREVIEWED, f"{difference}; compare a few steps with the stock path before you rely on it")


def judge_source(manifest: Manifest, tree: SourceTree) -> Judgement:
    """Judges a patch by a source tree, without importing the target.

    Foreign patches and stale bindings exist only in a running process; `Engine.plan` finds those.
    """
    target = Target.parse(manifest.target)
    here = megatron_release(tree) or "this version"
    if f"{target.module}.".startswith(f"{_OPTIONAL_PACKAGE}.") and tree.read(_OPTIONAL_PACKAGE) is None:
        return Judgement(Verdict.ABSENT, f"{here} has no {_OPTIONAL_PACKAGE}")
    if manifest.unchecked is not None:
        return NOT_COMPARED
    found = definitions(tree, target)
    if not found:
        return Judgement(Verdict.REFUSED, f"{here} has no {target.qualname} in {target.module}")
    # Where the source defines the target in several branches of an `if`, the worst judgement counts.
    order = [Verdict.APPLIES, Verdict.UNREVIEWED, Verdict.REFUSED]
    return max((judge(manifest, each, tree) for each in found), key=lambda each: order.index(each.verdict))


def digest_of(tree: SourceTree, name: str) -> str | None:
    """One digest of all that a tree defines under `module:qualname`; None where it defines nothing."""
    digests = [definition.digest for definition in definitions(tree, Target.parse(name))]
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _changed(manifest: Manifest, release: ReviewedRelease, definition: Definition, tree: SourceTree) -> list[str]:
    names = [] if release.digest == definition.digest else [Target.parse(manifest.target).qualname]
    for name, digest in release.relies_on.items():
        if digest_of(tree, name) != digest:
            names.append(Target.parse(name).qualname)
    return names
