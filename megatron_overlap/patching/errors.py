"""What the patching engine refuses, and what it only warns about."""


class PatchError(ValueError):
    """A patch cannot be planned, applied or reverted; the message names the target and the remedy."""


class ManifestError(PatchError):
    """A file under `patches/` is wrong; the message is one line `FILE: key: value: remedy`."""


class PatchRefusedError(PatchError):
    """At least one patch is refused and the caller asked for all of them."""


class RevertRefusedError(PatchError):
    """Somebody replaced an attribute after us; undoing ours would undo theirs, so nothing was changed."""


class PatchWarning(UserWarning):
    """A patch applies although something about its target was not read by anybody, or it was left out."""
