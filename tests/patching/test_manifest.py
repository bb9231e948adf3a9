"""Files under patches/: the package's own are complete, and the error of a wrong one is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_overlap.config import ConfigError
from megatron_overlap.patching.manifest import (
    Judgement,
    Verdict,
    judge_source,
    load_manifest_file,
    load_manifests,
)
from megatron_overlap.patching.source import DirectoryTree, installed_tree
from tests.helpers.releases import NEWEST, OLDEST, megatron_folder

GOOD: dict[str, Any] = {
    "target": "a.b:C.d",
    "replacement": "e:f",
    "feature": "tensor",
    "why": "because it is the only place",
    "releases": {"1.0.0": {"signature": "(self)", "digest": "0" * 64}},
}
RELIES = {"relies_on": ["a:b"], "releases": {"1.0": {"signature": "()", "digest": "0" * 64, "relies_on": {}}}}


def test_valid_manifest_loads(tmp_path: Path) -> None:
    file = tmp_path / "good.yaml"
    file.write_text(yaml.safe_dump(GOOD))
    (manifest,) = load_manifest_file(file)
    assert manifest.releases["1.0.0"].signature == "(self)"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target": "a.b.C.d"}, "target: 'a.b.C.d':"),
        ({"replacement": 3}, "replacement: 3:"),
        ({"why": "so"}, "why: 'so':"),
        ({"releases": {}}, "give releases"),
        ({"releases": {0.16: GOOD["releases"]["1.0.0"]}}, "releases.0.16"),
        ({"releases": {"1": {"signature": "()", "digest": "ABC"}}}, "match pattern '^[0-9a-f]{64}$'"),
        ({"releases": {"1": {"digest": "0" * 64}}}, "releases.1.signature"),
        ({"also_bound": ["x"]}, "also_bound.0: 'x':"),
        ({"replaces": "x"}, "replaces: 'x':"),
        (RELIES, "differ in a:b"),
        ({"unchecked": "a reason that is long enough"}, "give releases, or the reason in unchecked"),
        ({"releases": {}, "unchecked": "short"}, "unchecked: 'short':"),
        ({"substitute": "g:h"}, "give replacement or substitute"),
        ({"replacement": None, "substitute": "g:h"}, "a substitute needs unchecked"),
    ],
)
def test_error_of_a_wrong_key_is_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**GOOD, **change}))
    with pytest.raises(ConfigError) as caught:
        load_manifest_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", "", "\x00"])
def test_error_of_a_file_without_mapping_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_manifest_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_yaml_runs_no_code(tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = tmp_path / "code.yaml"
    file.write_text(f"why: !!python/object/apply:os.mkdir ['{made}']\n")
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        load_manifest_file(file)
    assert not made.exists()


def test_folder_without_manifests_and_two_of_one_target(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reinstall"):
        load_manifests(tmp_path)
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(GOOD))
    with pytest.raises(ConfigError, match=r"two\.yaml: target: a\.b:C\.d: another file has it"):
        load_manifests(tmp_path)


def test_own_manifests_have_the_supported_releases_or_a_reason() -> None:
    for manifest in load_manifests():
        if manifest.unchecked is None:
            assert {OLDEST, "0.17.1", "0.18.2", NEWEST} <= {*manifest.releases, *manifest.missing_from}


def test_own_manifests_fit_the_oldest_and_the_installed_release() -> None:
    installed = installed_tree()
    assert installed is not None
    for release, tree in ((NEWEST, installed), (OLDEST, DirectoryTree(megatron_folder(OLDEST)))):
        for manifest in load_manifests():
            judgement = judge_source(manifest, tree)
            if release == OLDEST and manifest.target.startswith("megatron.training"):
                # The wheel of this release has no training loop; a Megatron-LM checkout has.
                assert judgement.verdict is Verdict.ABSENT
                assert judgement.reason == f"{OLDEST} has no megatron.training"
                continue
            if release in manifest.missing_from:
                assert judgement == Judgement(Verdict.ABSENT, f"{release} has no {manifest.target.split(':')[1]}")
                continue
            assert judgement.verdict is Verdict.APPLIES, judgement.reason
            assert judgement.reason.endswith("not compared" if manifest.unchecked else "was reviewed")


def test_one_file_may_have_several_targets(tmp_path: Path) -> None:
    file = tmp_path / "several.yaml"
    shared = {key: value for key, value in GOOD.items() if key != "target"}
    file.write_text(yaml.safe_dump({**shared, "targets": {"a:b": {}, "c:d": {"feature": "data"}}}))
    first, second = load_manifest_file(file)
    assert (first.target, first.feature, first.why) == ("a:b", "tensor", GOOD["why"])
    assert (second.target, second.feature, second.why) == ("c:d", "data", GOOD["why"])


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ({"a:b": {"feature": 3}}, "targets.a:b.feature: 3:"),
        ({"a.b": {}}, "targets.a.b.target: 'a.b':"),
        (["a:b"], "targets: list: write a mapping"),
        ({"a:b": None}, "targets: dict: write a mapping"),
    ],
)
def test_error_of_wrong_targets_is_one_line(tmp_path: Path, targets: Any, message: str) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text(yaml.safe_dump({**GOOD, "targets": targets}))
    with pytest.raises(ConfigError) as caught:
        load_manifest_file(file)
    assert str(caught.value).startswith(f"{file}: {message}")
    assert "\n" not in str(caught.value)
