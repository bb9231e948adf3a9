"""A test or CI runs every documented command, or the page states that it needs GPUs.

This file runs commands that take seconds. `test_shortened_commands.py` runs longer commands with smaller inputs. A
command with placeholders (CONFIG, `[key=value ...]`) is a synopsis: its subcommand and options must exist.
"""

from __future__ import annotations

import ast
import pkgutil
import re
import shlex
from pathlib import Path

import pytest
import typer

from megatron_overlap import cli
from tests.docs.commands import COMMANDS, PLACEHOLDER
from tests.docs.test_shortened_commands import shortened
from tests.helpers.releases import ROOT

# The beginning of a command, and its runner: a test, or a script with its text of the command.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "scripts/new_user.sh: bash scripts/quickstart.sh",
    "bash scripts/test.sh": ".ci/run: bash scripts/test.sh",
    "bash .ci/run": ".ci/run: mypy",
    "python scripts/draw_partition.py": "tests/tools/test_plan.py: draw(",
    "python scripts/te_releases.py": ".github/workflows/weekly.yml: scripts/te_releases.py",
    "bash scripts/setup.sh te": ".github/workflows/weekly.yml: bash scripts/setup.sh te",
    "mkdocs build": ".ci/run: mkdocs build",
    "pip install -e .": "scripts/setup.sh: --editable",
    "python scripts/survey_seams.py": (
        "tests/patching/test_command.py::test_survey_prints_the_entries_of_the_manifests"
    ),
    "python scripts/rehearse_all.py": ".ci/run: scripts/rehearse_all.py",
    "python scripts/gpu/first_contact.py --dry-run": (
        "tests/scripts/test_first_contact.py::test_every_part_runs_in_the_interpreter"
    ),
    "python scripts/pages/screenshot.py": "tests/scripts/test_screenshot.py::test_the_picture_ends_where_the_page_ends",
    "torchrun --nproc-per-node 2 scripts/gpu/node.py --dry-run": (
        "tests/scripts/test_node.py::test_every_method_runs_on_the_cpu"
    ),
}
NEEDS_GPUS = re.compile(
    r"torchrun --nproc-per-node 8 |megatron-overlap compare gpu/|sbatch |python scripts/gpu/first_contact\.py --json"
)
CHEAP = [
    pytest.param(command, id=f"{page}: {command}")
    for page, command in COMMANDS
    if not PLACEHOLDER.search(command)
    and re.match(r"megatron-overlap (schema|plan|simulate|patches|launch .*(--dry-run|--emit-slurm))", command)
]
SYNOPSES = [
    pytest.param(command, id=f"{page}: {command}")
    for page, command in COMMANDS
    if PLACEHOLDER.search(command) and command.startswith("megatron-overlap ")
]
CHEAP_TEXTS = {str(param.values[0]) for param in CHEAP}


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 70
    assert len(CHEAP) >= 10
    assert ("README.md", "bash scripts/test.sh") in COMMANDS


@pytest.mark.parametrize("command", CHEAP)
def test_a_documented_command_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "docs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "lengths.txt").write_text("100\n2000\n30\n")
    (tmp_path / "my.yaml").write_text("base: cpu/gpt_tp2/overlap.yaml\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0


@pytest.mark.parametrize("command", SYNOPSES)
def test_a_synopsis_names_existing_options(command: str) -> None:
    words = re.findall(r"[\w=./:-]+", command)
    name = words[1]
    if name.isupper():
        return
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)
    app.command(name)(pkgutil.resolve_name(f"megatron_overlap.{cli.COMMANDS[name][0]}"))
    group = typer.main.get_command(app)
    options = {text for param in group.commands[name].params for text in param.opts}  # type: ignore[attr-defined]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_every_documented_command_has_a_runner(page: str, command: str) -> None:
    if command in CHEAP_TEXTS or PLACEHOLDER.search(command) or shortened(command) is not None:
        return
    if NEEDS_GPUS.match(command):
        assert "GPU" in section(page, command), f"{page}: state that `{command}` needs GPUs"
        return
    place = next((where for start, where in ELSEWHERE.items() if command.startswith(start)), None)
    assert place is not None, f"{page}: no test runs `{command}`: add it to ELSEWHERE or to test_shortened_commands.py"
    file, test, name = place.partition("::")
    if test:
        functions = [node for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
        assert name in {function.name for function in functions}, place
    else:
        file, _, words = place.partition(": ")
        assert words in (ROOT / file).read_text(encoding="utf-8"), place


def section(page: str, command: str) -> str:
    """The section of a page that contains a command."""
    file = ROOT / page if page == "README.md" else ROOT / "docs" / page
    return next(part for part in re.split(r"^#", file.read_text(), flags=re.MULTILINE) if command[:40] in part)
