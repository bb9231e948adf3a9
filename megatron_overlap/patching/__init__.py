"""Replaces attributes of Megatron and torch: plans all patches, applies all or none, reverts exactly.

Imports neither torch nor megatron: a target is a name, and its source text is judged.
"""


class PatchError(ValueError):
    """A patch cannot be planned, applied or reverted; the message names the target and the remedy."""


class PatchRefusedError(PatchError):
    """At least one patch is refused and the caller requires all of them."""


class RevertRefusedError(PatchError):
    """Another package replaced an attribute after us. Undoing ours would undo theirs, so nothing was changed."""


class PatchWarning(UserWarning):
    """A patch applies to source that was not reviewed, or is refused and left out."""
