"""`megatron-overlap patches` and the survey script. Some tests start them as commands; others call their functions."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess

import megatron.core
import pytest
import yaml

from megatron_overlap import cli
from megatron_overlap.patching.manifest import load_manifests
from scripts import survey_seams
from tests.helpers.releases import NEWEST, OLDEST, megatron_folder, run_python

SYMBOLS = [
    name
    for manifest in load_manifests()
    for name in (manifest.target, *manifest.relies_on)
    if name.startswith("megatron.core.")
]
MODULES = {"megatron.core.package_info", *(name.partition(":")[0] for name in SYMBOLS)}
INSTALLED = Path(megatron.core.__file__).parents[2]
FILES = [f"{module.replace('.', '/')}.py" for module in sorted(MODULES)]


def copied(release_folder: Path, folder: Path, old: str, new: str) -> Path:
    """Copies the surveyed files of a release as release 9.9.9, with one change in layers.py."""
    for name in FILES:
        text = (release_folder / name).read_text()
        if name.endswith("package_info.py"):
            text = "MAJOR = 9\nMINOR = 9\nPATCH = 9\n"
        elif name.endswith("tensor_parallel/layers.py"):
            assert old in text
            text = text.replace(old, new)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


Run = Callable[[Callable[[Sequence[str]], int], Sequence[str]], CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Calls the main function of a program with arguments."""

    def called(main: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> CompletedProcess[str]:
        capsys.readouterr()
        code = main(arguments)
        return CompletedProcess(arguments, code, *capsys.readouterr())

    return called


def test_patches_of_the_installed_and_the_oldest_release() -> None:
    command = ["-m", "megatron_overlap.cli", "patches"]
    here, there = run_python(command), run_python([*command, "--megatron", str(megatron_folder(OLDEST))])
    for done, release in ((here, NEWEST), (there, OLDEST)):
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 120
        assert f"{release} was reviewed" in done.stdout
        for manifest in load_manifests():
            assert manifest.feature in done.stdout
            assert manifest.feature == "cpu_torch" or manifest.target.rpartition(":")[2] in done.stdout
        assert len(done.stdout.splitlines()) < 64
    assert "absent" not in here.stdout
    assert f"{OLDEST} has no megatron.training" in " ".join(there.stdout.replace("│", " ").split())


def test_patches_prints_every_attribute_and_its_reason_on_request(run: Run) -> None:
    done = run(cli.main, ["patches", "--reasons"])
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120
    for manifest in load_manifests():
        assert manifest.target.rpartition(":")[2] in done.stdout
        assert " ".join(manifest.why.split()[:3]) in done.stdout
        assert manifest.unchecked is None or "Not compared: " in done.stdout


def test_patches_of_a_future_release(run: Run, tmp_path: Path) -> None:
    old = "def _forward_impl(self, input, weight, *args, **kwargs):"
    folder = copied(INSTALLED, tmp_path / "signature", old, old.replace("weight", "tensor"))
    done = run(cli.main, ["patches", "--megatron", str(folder)])
    assert done.returncode == 1
    assert "refused" in done.stdout
    folder = copied(INSTALLED, tmp_path / "body", "allreduce_dgrad = False", "allreduce_dgrad = bool(0)")
    done = run(cli.main, ["patches", "--megatron", str(folder)])
    assert done.returncode == 0
    assert "applies unreviewed" in done.stdout


def test_patches_without_a_megatron_is_one_line(run: Run, tmp_path: Path) -> None:
    done = run(cli.main, ["patches", "--megatron", str(tmp_path)])
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "holds no megatron-core" in done.stderr


def test_survey_prints_the_entries_of_the_manifests(tmp_path: Path) -> None:
    folder = megatron_folder(OLDEST)
    wheel = tmp_path / "megatron_core.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in FILES:
            archive.write(folder / name, name)
    done = run_python(["scripts/survey_seams.py", str(wheel)])
    assert done.returncode == 0, done.stderr
    assert f"┃ {OLDEST} ┃" in done.stdout
    entries = [yaml.safe_load(block.partition("\n")[2]) for block in done.stdout.split("\n# megatron.")[1:]]
    checked = [manifest for manifest in load_manifests() if manifest.unchecked is None]
    of_core = [manifest for manifest in checked if manifest.target.startswith("megatron.core.")]
    here = [manifest.releases[OLDEST] for manifest in of_core if OLDEST not in manifest.missing_from]
    written = [release.model_dump(exclude_unset=True) for release in here]
    assert [entry[OLDEST] for entry in entries if entry] == written


def test_survey_of_any_symbol_over_two_releases(run: Run, tmp_path: Path) -> None:
    folder = copied(megatron_folder(OLDEST), tmp_path, "allreduce_dgrad = False", "allreduce_dgrad = bool(0)")
    symbol = "megatron.core.tensor_parallel.layers:RowParallelLinear.forward"
    done = run(survey_seams.main, [str(megatron_folder(OLDEST)), str(folder), "--symbol", symbol])
    row = next(line for line in done.stdout.splitlines() if "RowParallelLinear.forward" in line)
    assert row.split("│")[2:6] == [" 1      ", " 2     ", " 1          ", " 2      "]
    shutil.rmtree(folder / "megatron")
    done = run(survey_seams.main, [str(folder)])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "holds no megatron-core" in done.stderr
    done = run(survey_seams.main, ["--symbol", "no colon"])
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
