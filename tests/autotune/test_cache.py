"""The autotuning cache: what is written is read again, and a damaged file never stops a run."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest

from megatron_overlap.autotune.candidates import HOPPER, STOCK, AutotuneCache, Candidate
from megatron_overlap.autotune.search import Selection
from megatron_overlap.schedules.heuristics import fused_settings

ENVIRONMENT = {"torch": "2.13", "device": "a", "ranks by host": "2 2"}
ENTRY = Selection("p2p ring x 4", 60.0, 100.0, "cached")
OTHER = Selection("stock", 2.0, 2.0, "cached")


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def test_an_entry_is_read_again_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    AutotuneCache(folder, ENVIRONMENT).put("a", ENTRY)
    AutotuneCache(folder, ENVIRONMENT).put("b", OTHER)
    cache = AutotuneCache(folder, ENVIRONMENT)
    assert cache.get("a") == ENTRY
    assert cache.get("b") == OTHER
    assert cache.get("c") is None
    assert [path.stat().st_mode & 0o777 for path in files(folder)] == [0o600, 0o600]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.suffix for path in folder.iterdir()} == {".json"}, "no temporary file is left"
    tree = json.loads(files(folder)[0].read_text())
    assert tree["environment"] == ENVIRONMENT
    assert tree["call"] in ("a", "b")


def test_a_later_entry_replaces_an_earlier_one(tmp_path: Path) -> None:
    cache = AutotuneCache(tmp_path, ENVIRONMENT)
    cache.put("a", ENTRY)
    cache.put("a", OTHER)
    assert AutotuneCache(tmp_path, ENVIRONMENT).get("a") == OTHER
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("key", list(ENVIRONMENT))
def test_another_environment_has_other_entries(tmp_path: Path, key: str) -> None:
    AutotuneCache(tmp_path, ENVIRONMENT).put("a", ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert AutotuneCache(tmp_path, {**ENVIRONMENT, key: "other"}).get("a") is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "JSONDecodeError"),
        ('{"format": "mega', "JSONDecodeError"),
        ("\x80\x04}", "UnicodeDecodeError"),
        ("[]", "TypeError"),
        ("{}", "KeyError"),
        ({"us": -1}, "must be positive numbers"),
        ({"stock_us": float("nan")}, "must be positive numbers"),
        ({"us": "fast"}, "ValueError"),
        ({"us": None}, "TypeError"),
    ],
)
def test_a_damaged_file_is_ignored_with_one_warning_and_replaced(tmp_path: Path, content: object, problem: str) -> None:
    AutotuneCache(tmp_path, ENVIRONMENT).put("a", ENTRY)
    (path,) = files(tmp_path)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(str(content), encoding="latin-1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = AutotuneCache(tmp_path, ENVIRONMENT)
        assert cache.get("a") is None
        assert cache.get("a") is None
        cache.put("b", ENTRY)
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert problem in str(warning.message)
    assert cache.get("b") == ENTRY, "the other entries are good"
    cache.put("a", ENTRY)
    assert AutotuneCache(tmp_path, ENVIRONMENT).get("a") == ENTRY, "the next selection replaces it"


def test_a_folder_that_cannot_be_written_costs_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = AutotuneCache(tmp_path / "file" / "folder", ENVIRONMENT)
    with pytest.warns(RuntimeWarning, match="cannot be read"):
        assert cache.get("a") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put("a", ENTRY)


def test_a_full_disk_leaves_no_temporary_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.warns(RuntimeWarning, match="No space left"):
        AutotuneCache(tmp_path, ENVIRONMENT).put("a", ENTRY)
    assert list(tmp_path.iterdir()) == []


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    def write(name: str) -> None:
        cache = AutotuneCache(tmp_path, ENVIRONMENT)
        for number in range(10):
            cache.put(f"{name}{number}", ENTRY)
            cache.put("shared", ENTRY)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(files(tmp_path)) == 41
    assert {path.suffix for path in tmp_path.iterdir()} == {".json"}
    cache = AutotuneCache(tmp_path, ENVIRONMENT)
    assert {cache.get(f"{name}{number}") for name in "abcd" for number in range(10)} == {ENTRY}


def test_names_of_candidates_identify_them() -> None:
    """The cache and the exchange between ranks know a candidate by its name."""
    names = {
        "stock": STOCK,
        "p2p": Candidate("p2p"),
        "p2p direct": Candidate("p2p", "direct"),
        "p2p ring x 4": Candidate("p2p", "ring", 4),
        "p2p x 2": Candidate("p2p", None, 2),
        "fused kernel=hopper": HOPPER,
        "fused mover=pull spare_sms=8": Candidate("fused", knobs=(("mover", "pull"), ("spare_sms", 8))),
    }
    assert {str(candidate): candidate for candidate in names.values()} == names
    variants = [Candidate("fused", knobs=knobs) for knobs in fused_settings(8, 8192, hopper=True)]
    assert len({str(each) for each in variants}) == len(variants)
