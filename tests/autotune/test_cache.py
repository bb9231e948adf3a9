"""The disk cache of choices: what is written is read, and nothing that is wrong on disk stops a run."""

from __future__ import annotations

import json
import threading
import warnings
from pathlib import Path

import pytest

from megatron_overlap.autotune.cache import ChoiceCache, ChoiceCacheWarning, Entry, kept
from megatron_overlap.autotune.candidates import STOCK, Candidate

HERE = {"torch": "2.13", "device": "a", "ranks by host": "2 2"}
ENTRY = Entry(Candidate("p2p", "ring", 4), 60.0, 100.0, 120.0)


def test_what_is_kept_is_read_again_and_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    ChoiceCache(folder, HERE).put("a", ENTRY)
    ChoiceCache(folder, HERE).put("b", Entry(STOCK, 1.0, 1.0, 2.0))
    cache = ChoiceCache(folder, HERE)
    assert cache.get("a") == ENTRY
    assert cache.get("b") == Entry(STOCK, 1.0, 1.0, 2.0)
    assert cache.get("c") is None
    assert cache.path.stat().st_mode & 0o777 == 0o600
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [(key, entry) for _, key, entry in kept(folder)] == [("a", ENTRY), ("b", cache.get("b"))]


@pytest.mark.parametrize("key", list(HERE))
def test_another_environment_finds_nothing(tmp_path: Path, key: str) -> None:
    ChoiceCache(tmp_path, HERE).put("a", ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ChoiceCache(tmp_path, {**HERE, key: "other"}).get("a") is None


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("", "cannot be read"),
        ('{"format": "mega', "cannot be read"),
        ("\x80\x04}", "cannot be read"),
        ("[]", "is not of this release"),
        ('{"format": "megatron_overlap choices 0"}', "is not of this release"),
        ({"environment": {**HERE, "torch": "2.12"}}, "is not of this release"),
        ({"choices": []}, "has no choices"),
        ({"choices": {"a": {**ENTRY.as_dict(), "us": -1}}}, "1 of its entries"),
        ({"choices": {"a": {**ENTRY.as_dict(), "us": True, "method": "p3p"}}}, "1 of its entries"),
        ({"choices": {"a": {**ENTRY.as_dict(), "chunks_per_rank": "4"}}}, "1 of its entries"),
        ({"choices": {"a": 7}}, "1 of its entries"),
    ],
)
def test_what_means_nothing_is_ignored_with_one_warning_and_replaced(
    tmp_path: Path, content: object, what: str
) -> None:
    path = ChoiceCache(tmp_path, HERE).path
    ChoiceCache(tmp_path, HERE).put("a", ENTRY)
    if isinstance(content, dict):
        content = json.dumps({**json.loads(path.read_text()), **content})
    path.write_text(str(content), encoding="latin-1")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        cache = ChoiceCache(tmp_path, HERE)
        assert cache.get("a") is None
        cache.put("b", ENTRY)
    (warning,) = caught
    assert warning.category is ChoiceCacheWarning
    assert what in str(warning.message)
    assert ChoiceCache(tmp_path, HERE).get("b") == ENTRY, "what is written replaces it"


def test_a_good_entry_beside_a_wrong_one_is_used(tmp_path: Path) -> None:
    cache = ChoiceCache(tmp_path, HERE)
    cache.put("a", ENTRY)
    tree = json.loads(cache.path.read_text())
    tree["choices"]["b"] = {}
    cache.path.write_text(json.dumps(tree))
    with pytest.warns(ChoiceCacheWarning):
        assert ChoiceCache(tmp_path, HERE).get("a") == ENTRY


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(ChoiceCacheWarning, match="cannot be"):
        cache = ChoiceCache(tmp_path / "file" / "folder", HERE)
    cache.put("a", ENTRY)
    assert cache.get("a") == ENTRY, "this run still has it"


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    def write(name: str) -> None:
        cache = ChoiceCache(tmp_path, HERE)
        for number in range(10):
            cache.put(f"{name}{number}", ENTRY)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(list(kept(tmp_path))) == 40
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_an_entry_belongs_to_a_link_of_about_its_rate() -> None:
    assert ENTRY.fits(120.0)
    assert ENTRY.fits(61.0)
    assert not ENTRY.fits(59.0)
    assert not ENTRY.fits(241.0)
