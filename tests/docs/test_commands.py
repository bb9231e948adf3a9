"""Every command that the README and the pages show: run here, run by a test or script that is named here, or for GPUs.

A command with placeholders (CONFIG, `[key=value ...]`) is a synopsis: its subcommand and its options must exist.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from megatron_overlap import cli
from tests.helpers.releases import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("megatron-overlap", "python", "bash", "torchrun", "pip", "sbatch", "mkdocs")

# What takes longer: the beginning of a command, and what runs it: a file that mentions the words after `:`.
ELSEWHERE = {
    "bash scripts/quickstart.sh": "scripts/new_user.sh:quickstart.sh",
    "bash scripts/test.sh": ".ci/run:scripts/test.sh",
    "bash .ci/run": ".ci/run:mypy",
    "mkdocs build": ".ci/run:mkdocs build",
    "pip install -e .": "scripts/setup.sh:--editable",
    "pip download --no-deps megatron-core": "tests/helpers/releases.py:megatron-core==",
    "python scripts/survey_seams.py": "tests/patching/test_commands.py:survey",
    "python scripts/prepare_data.py": "scripts/quickstart.sh:prepare_data.py",
    "megatron-overlap compare --logs": "tests/measure/test_logs.py:--logs",
    "megatron-overlap compare": "tests/measure/test_command.py:compare",
    "megatron-overlap doctor": "tests/measure/test_doctor.py:doctor",
    "megatron-overlap launch llama3_70b_tp4_pp8_overlap --rehearse": "tests/launch/test_rehearsal.py:--rehearse",
    "megatron-overlap launch llama3_8b_tp8_overlap --rehearse": "tests/launch/test_rehearsal.py:--rehearse",
    "megatron-overlap launch configs/llama_cp2_varlen_overlap.yaml": "tests/adapters/test_varlen.py:varlen",
    "megatron-overlap launch": "tests/launch/test_rehearsal.py:launch",
    "megatron-overlap tune": "tests/tune:tune",
    "megatron-overlap trace": "tests/measure/test_trace.py:trace",
}
# Run by hand, as they take minutes or links between hosts: that the script and its options are there is tested.
BY_HAND = re.compile(r"(?:python|bash) (scripts/\S+)")
NEEDS_GPUS = ("torchrun", "sbatch", "python scripts/bench/fused_one_gpu.py")
# Options that the benchmarks have from scripts/bench/harness.py.
INHERITED = set(re.findall(r"--[\w-]+", (ROOT / "scripts" / "bench" / "harness.py").read_text(encoding="utf-8")))
PLACEHOLDER = re.compile(
    r"\b(?:CONFIG|FILE|RUN_DIR|PROFILE|HOST|PORT|PATH|NAME|SHARED_FOLDER|WHEEL_OR_FOLDER|[AB]\.yaml|NEW)\b|\[|<|\.\.\.|X\.Y"
)


def commands() -> list[tuple[str, str]]:
    """Page and command, each once; comments and output redirections left out."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        shown = [line.strip() for line in text.splitlines() if line.startswith("    ") or line.startswith(PROGRAMS)]
        shown += re.findall(r"`((?:megatron-overlap|python|bash) [^`]+)`", text)
        for line in shown:
            command = re.sub(r"\s+", " ", re.split(r"\s+#|\s+>|\s+<<<", line)[0]).strip()
            if command.startswith(tuple(f"{program} " for program in PROGRAMS)) and not command.startswith("python -"):
                found[page.name, command] = None
    return list(found)


COMMANDS = commands()
CHEAP = [
    pytest.param(command, id=f"{page}: {command}")
    for page, command in COMMANDS
    if not PLACEHOLDER.search(command)
    and re.match(r"megatron-overlap (schema|plan|simulate|patches|launch .*(--dry-run|--emit-slurm))", command)
    and "my.yaml" not in command
    and "calibrated" not in command
]
SYNOPSES = [
    pytest.param(command, id=f"{page}: {command}")
    for page, command in COMMANDS
    if PLACEHOLDER.search(command) and command.startswith("megatron-overlap ")
]
CHEAP_TEXTS = {str(param.values[0]) for param in CHEAP}


def test_commands_are_found() -> None:
    assert len(COMMANDS) > 30
    assert len(CHEAP) >= 5
    assert ("README.md", "bash scripts/test.sh") in COMMANDS


@pytest.mark.parametrize("command", CHEAP)
def test_it_runs(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("configs", "docs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "lengths.txt").write_text("100\n2000\n30\n")
    monkeypatch.chdir(tmp_path)
    assert cli.main(shlex.split(command)[1:]) == 0


@pytest.mark.parametrize("command", SYNOPSES)
def test_a_synopsis_names_what_there_is(command: str) -> None:
    words = re.findall(r"[\w=./:-]+", command)
    name = words[1]
    if name.isupper():
        return
    app = typer.Typer(add_completion=False)
    app.callback()(lambda: None)
    app.command(name)(cli._load(cli.COMMANDS[name][0]))
    group = typer.main.get_command(app)
    options = {text for param in group.commands[name].params for text in param.opts}  # type: ignore[attr-defined]
    assert {word.partition("=")[0] for word in words if word.startswith("--")} <= options


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_no_command_is_shown_that_nobody_runs(page: str, command: str) -> None:
    if command in CHEAP_TEXTS or PLACEHOLDER.search(command) or command.startswith(NEEDS_GPUS):
        return
    place = next((where for start, where in ELSEWHERE.items() if command.startswith(start)), None)
    script = BY_HAND.match(command)
    if place is None and script is not None:
        source = (ROOT / script[1]).read_text(encoding="utf-8")
        assert {option for option in re.findall(r"--[\w-]+", command) if option not in source} <= INHERITED
        return
    assert place is not None, f"{page} shows `{command}`: say in ELSEWHERE what runs it"
    name, _, words = place.partition(":")
    file = ROOT / name
    files = sorted(file.rglob("*.py")) if file.is_dir() else [file]
    assert any(words in one.read_text(encoding="utf-8") for one in files), place
