"""Selections on disk, so that the next run of the same kind starts with them.

A folder of JSON files, one for each kind of call in each environment (hardware, versions, topology). Files are private
to their user, written beside their place and renamed. Files that cannot be read are ignored with one warning.
"""

import hashlib
import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

from megatron_overlap.autotune.search import Selection


class AutotuneCache:
    """The selections of one environment, by the names of their candidates.

    Args:
        folder: of the files; created by the first `put`.
        environment: the releases, hardware and topology that a selection depends on.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self._environment, self._warned = folder, dict(environment), False

    def get(self, key: str) -> Selection[str] | None:
        """The selection for the kind of call `key`, with the reason `cached`."""
        path = self._path(key)
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            found = Selection(str(tree["candidate"]), float(tree["us"]), float(tree["stock_us"]), "cached")
            if not all(math.isfinite(us) and us > 0 for us in (found.us, found.stock_us)):
                raise ValueError("us and stock_us must be positive numbers")
            return found
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._warn(path, "read", error)
            return None

    def put(self, key: str, selection: Selection[str]) -> None:
        """Writes a selection; other processes may write at the same time."""
        tree = {"environment": self._environment, "call": key, **selection._asdict()}
        path = self._path(key)
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Only the owner can read a file of mkstemp. After the rename a reader sees the whole file.
            number, name = tempfile.mkstemp(dir=self._folder, prefix=path.stem)
            with os.fdopen(number, "w", encoding="utf-8") as file:
                json.dump(tree, file, indent=1)
            os.replace(name, path)
        except OSError as error:
            self._warn(path, "written", error)

    def _path(self, key: str) -> Path:
        text = json.dumps([self._environment, key], sort_keys=True)
        return self._folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"

    def _warn(self, path: Path, verb: str, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            text = f"{path}: cannot be {verb}: {error!r}; its layers are measured again"
            warnings.warn(text, RuntimeWarning, stacklevel=3)
