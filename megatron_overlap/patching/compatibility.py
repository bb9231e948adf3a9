"""Decides whether a patch fits a release, from its manifest and that release's source text alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum

from megatron_overlap.patching.manifest import Manifest, ReadRelease
from megatron_overlap.patching.source import Definition, SourceTree, Target, definitions, megatron_release


class Verdict(StrEnum):
    """What may be done with one patch."""

    APPLIES = "applies"
    UNREAD = "applies unread"
    REFUSED = "refused"


@dataclass(frozen=True)
class Judgement:
    """A verdict and the sentence that explains it."""

    verdict: Verdict
    reason: str


def judge(manifest: Manifest, definition: Definition, tree: SourceTree) -> Judgement:
    """Compares one definition, and what the replacement relies on around it, with the releases read."""
    here = megatron_release(tree) or "this version"
    same_signature = {
        name: release for name, release in manifest.releases.items() if release.signature == definition.signature
    }
    if not same_signature:
        known = ", ".join(sorted({release.signature for release in manifest.releases.values()}))
        return Judgement(
            Verdict.REFUSED,
            f"{here} has the signature {definition.signature}, and only {known} was read;"
            " use a release that was read, or a newer megatron-overlap",
        )
    changed = {name: _changed(manifest, release, definition, tree) for name, release in same_signature.items()}
    read = [name for name, names in changed.items() if not names]
    if here in read:
        return Judgement(Verdict.APPLIES, f"{here} was read")
    if read:
        return Judgement(Verdict.APPLIES, f"{here} has the same source as {read[-1]}, which was read")
    nearest = min(reversed(changed), key=lambda name: len(changed[name]))
    if here in changed:
        what = f"this is not the {here} that was read: it differs in {', '.join(changed[here])}"
    else:
        what = f"{here} was not read; from {nearest}, the nearest that was, it differs in {', '.join(changed[nearest])}"
    return Judgement(Verdict.UNREAD, f"{what}; compare a few steps with the plugin off before you trust it")


def judge_source(manifest: Manifest, tree: SourceTree) -> Judgement:
    """Judges a patch by a source tree, without importing the target.

    Patches by others and stale bindings exist only in a running process: `Engine.plan` looks for those.
    """
    target = Target.parse(manifest.target)
    found = definitions(tree, target)
    here = megatron_release(tree) or "this version"
    if not found:
        return Judgement(Verdict.REFUSED, f"{here} has no {target.qualname} in {target.module}")
    # Where the source chooses by `if`, the worst case counts: which branch is taken shows only when it runs.
    order = [Verdict.APPLIES, Verdict.UNREAD, Verdict.REFUSED]
    return max((judge(manifest, each, tree) for each in found), key=lambda each: order.index(each.verdict))


def digest_of(tree: SourceTree, name: str) -> str | None:
    """One digest for everything a tree defines under `module:qualname`; None where it defines nothing."""
    digests = [definition.digest for definition in definitions(tree, Target.parse(name))]
    if len(digests) < 2:
        return digests[0] if digests else None
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _changed(manifest: Manifest, release: ReadRelease, definition: Definition, tree: SourceTree) -> list[str]:
    names = [] if release.digest == definition.digest else [Target.parse(manifest.target).qualname]
    for name, digest in release.relies_on.items():
        if digest_of(tree, name) != digest:
            names.append(Target.parse(name).qualname)
    return names
