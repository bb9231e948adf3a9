"""Documented commands that take minutes, each with additional options that shorten it.

They run in a copy of the tree, because some write into it. Later options and keys override earlier ones, so that the
parser reads all words of the page. The daily run has one command of each kind; the others are marked `long`, and so
are those of programs that another daily test runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron_overlap.config.resources import transformer_engine_available
from tests.docs.commands import COMMANDS, PLACEHOLDER
from tests.helpers.forked_python import ForkedPython
from tests.helpers.netlab import available
from tests.helpers.releases import ROOT

HAS_NETLAB, REASON = available()
ONE = "--ratios 1 --rounds 1 --warmup 0"
LINEAR = "--rows 64 --in-features 64 --out-features 64 --rounds 1 --warmup 0"
TINY = "model.num_layers=1 train.seq_length=128 train.iterations=3"


@dataclass(frozen=True)
class Short:
    """How a documented command is shortened.

    Attributes:
        start: beginning of the command; the longest match applies.
        more: options to append.
        hosts: whether the command makes network namespaces, which not every machine allows.
        codes: accepted exit codes: some scripts exit with 1 if a measured figure misses its target.
        long: whether only the weekly run has the command, because it is long or repeats another one.
        forks: whether the ranks of the command start as forks, with the imports of this repository.
    """

    start: str
    more: str = ""
    hosts: bool = False
    codes: tuple[int, ...] = (0,)
    long: bool = False
    forks: bool = False


SHORTENED = (
    Short("megatron-overlap compare cpu/", f"--rounds 1 {TINY}", hosts=True, long=True),
    Short("megatron-overlap compare cpu/llama_tp2/netlab launch", f"--rounds 1 {TINY}", hosts=True, long=True),
    Short(
        "megatron-overlap compare cpu/llama_tp2/netlab --generate",
        f"--rounds 1 --prompt-tokens 8 --batches 1 --new-tokens 2 {TINY}",
        hosts=True,
        long=True,
    ),
    Short("megatron-overlap compare --logs"),
    Short("megatron-overlap doctor", "--deadline 60", long=True),
    Short("megatron-overlap launch cpu/llama_cp2_varlen", "train.iterations=3", long=True),
    Short("megatron-overlap launch cpu/llama_tp2/overlap", TINY, long=True),
    # tests/tools/launch/test_command.py launches a training.
    Short("megatron-overlap launch my.yaml", TINY, forks=True, long=True),
    Short("megatron-overlap launch my.yaml --dry-run"),
    Short("megatron-overlap launch gpu/llama3_70b_tp4_pp8/overlap --rehearse", long=True),
    Short("megatron-overlap launch gpu/llama3_8b_tp8/overlap --rehearse", "--rehearse-ranks 2", long=True),
    Short("python scripts/bench/linear.py", f"{LINEAR} --ratios 1", hosts=True, forks=True),
    Short("python scripts/bench/linear.py --hosts 2 --rows", f"{LINEAR} --ratios 1", hosts=True, long=True),
    Short("python scripts/bench/linear.py --hosts 2 --ops", f"{LINEAR} --gbps 1", hosts=True, long=True),
    Short("python scripts/bench/plot.py"),
    Short(
        "python scripts/bench/autotune.py",
        "--rows 8 --links 1,64,64 --seconds 0.2",
        hosts=True,
        codes=(0, 1),
        long=True,
    ),
    Short("python scripts/calibrate.py", long=True),
    Short("python scripts/bench/data_parallel.py", f"{ONE} --layers 2 --hidden 64 --tokens 64", hosts=True, long=True),
    Short(
        "python scripts/bench/ulysses.py",
        f"{ONE} --sequence 64 --hidden 64 --heads 4 --kv-heads 4",
        hosts=True,
        long=True,
    ),
    Short(
        "python scripts/bench/expert_parallel.py",
        "--rounds 1 --warmup 0 --rows 64 --hidden 32 --ffn 32 --experts 2",
        hosts=True,
        long=True,
    ),
    Short(
        "python scripts/bench/split.py",
        "--rounds 1 --sequence 32 --hidden 64 --ffn 64 --layers 1 --auto-steps 2",
        hosts=True,
        long=True,
    ),
    Short(
        "python scripts/bench/generation.py",
        "--rounds 1 --prompt 16 --tokens 2 --hidden 64 --layers 1",
        hosts=True,
        long=True,
    ),
    Short(
        "python scripts/bench/attention.py",
        f"{ONE} --positions 64 --heads 2 --kv-heads 2 --features 32",
        hosts=True,
        long=True,
    ),
    Short("python scripts/bench/paper.py", "--shapes 1 --rounds 1 --no-attention", hosts=True, long=True),
    Short(
        "python scripts/bench/varlen.py",
        "--tokens 128 --batches long --scopes attention --direction forward --rounds 1 --warmup 0 --seeds 0",
        hosts=True,
        long=True,
    ),
    Short("python scripts/bench/partition.py", "--seeds 1 --tokens 65536 --nodes 2 --repeats 1"),
    Short("python scripts/simulate_varlen.py", "--ranks 16 --profiles h800 --distributions prolong --seeds 1"),
    # tests/tools/simulate/test_command.py computes its tables.
    Short("python scripts/simulate_papers.py", long=True),
    Short("python scripts/validate_simulator.py", "--shapes 1", hosts=True, long=True),
    # The fixture `complete_tree` runs it, and tests/scripts/test_prepare_data.py daily.
    Short("python scripts/prepare_data.py", "--max-documents 8 --vocab-size 300 --force", long=True),
    Short("python scripts/prepare_data.py --output", "--max-documents 8 --vocab-size 300 --force", long=True),
    Short("python scripts/equality.py", "--iterations 4 --models gpt --layouts TP2 --no-resume", long=True),
    Short("python scripts/faults.py", "--cases 2", long=True),
    Short("python scripts/fuzz.py --configs 10000", "--configs 20 --calls 0"),
    Short("python scripts/fuzz.py --configs 0", "--trainings 1", long=True),
    Short("python scripts/soak.py", "--steps 40", codes=(0, 1)),
    Short("python scripts/long_run.py", "--iterations 40 --kills 1", long=True),
    # Memory still grows in the first steps.
    Short("python scripts/long_run.py --experts", "--iterations 16", codes=(0, 1), long=True),
    Short("python scripts/megatron_tests.py", "--ranks 2", long=True),
    Short("python scripts/mutants.py", "--kind schedules --minutes 0.01", long=True),
    Short("python scripts/check_checkouts.py", "Megatron-LM", long=True),
    Short("python scripts/expected_mfu.py", long=True),
    Short("python scripts/fused_table.py", "--arch 80 --name ag_gemm", long=True),
    Short("python scripts/draw_schedule.py"),
    Short("python scripts/pages/configuration.py"),
    Short("python scripts/draw_architecture.py"),
    Short("bash scripts/check_wheel.sh", "--shared-packages", long=True),
    Short("bash scripts/new_user.sh", "--shared-environment", long=True),
)


def shortened(command: str) -> Short | None:
    """The entry of a command in the table; None: it has none."""
    return max(
        (one for one in SHORTENED if command.startswith(one.start)), key=lambda one: len(one.start), default=None
    )


def cases() -> list[object]:
    """Commands of the pages. Commands with equal options appear once."""
    found = {}
    for page, command in COMMANDS:
        how = shortened(command)
        if how is None or PLACEHOLDER.search(command):
            continue
        options = {word for word in command.split() if word.startswith("--") and word != "--json"}
        words = tuple(word for word in command.split()[2:] if ".yaml" in word)
        marks = [pytest.mark.long] if how.long else []
        marks += [pytest.mark.skipif(how.hosts and not HAS_NETLAB, reason=f"no netlab: {REASON}")]
        param = pytest.param(command, how, id=f"{page}: {command}", marks=marks)
        found.setdefault((how.start, frozenset(options), words), param)
    return list(found.values())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this repository with logs."""
    folder = tmp_path_factory.mktemp("tree")
    for name in ("megatron_overlap", "patches", "configs", "scripts", "docs", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    if (ROOT / ".transformer_engine").is_dir():
        (folder / ".transformer_engine").symlink_to(ROOT / ".transformer_engine")
    texts = folder / "my_texts"
    texts.mkdir()
    for number, file in enumerate(sorted((ROOT / "docs").glob("*.md"))[:8]):
        (texts / f"{number}.txt").write_text(file.read_text())
    (folder / "my.yaml").write_text("base: cpu/gpt_tp2/overlap.yaml\n")
    shutil.copy(ROOT / "docs" / "results" / "linear_2_hosts.json", folder / "linear.json")
    logs = sorted((ROOT / "tests" / "tools" / "compare" / "logs").glob("*.log"))
    for name, log in (("base", logs[1]), ("overlap", logs[2]), ("userbuffers", logs[1])):
        shutil.copy(log, folder / f"{name}.log")
    return folder


@pytest.fixture(scope="module")
def complete_tree(tree: Path) -> Path:
    """The copy with data, a checkout of Megatron-LM and a commit, which only commands of the weekly run need."""
    unit_tests = tree / "Megatron-LM" / "tests" / "unit_tests"
    (unit_tests / "tensor_parallel").mkdir(parents=True)
    for package in (unit_tests.parent, unit_tests, unit_tests / "tensor_parallel"):
        (package / "__init__.py").touch()
    (unit_tests / "tensor_parallel" / "test_layers.py").write_text("def test_something(): pass\n")
    for script in (ROOT / "scripts").glob("pretrain_*.py"):
        shutil.copy(script, tree / "Megatron-LM" / script.name)
    for command in ("init", "add --all", "-c user.name=a -c user.email=a@b commit --message all"):
        subprocess.run(["git", *command.split()], cwd=tree, check=True, stdout=subprocess.DEVNULL)
    run(tree, "python scripts/prepare_data.py --output data/stdlib --max-documents 8 --vocab-size 300", (0,))
    return tree


def run(folder: Path, command: str, codes: tuple[int, ...], forks: ForkedPython | None = None) -> None:
    """Run a command in a tree and check that the files of its options exist afterwards."""
    words = [word.replace("~", str(folder)) for word in shlex.split(command)]
    programs = {"python": [sys.executable], "megatron-overlap": [sys.executable, "-m", "megatron_overlap.cli"]}
    if forks is not None:
        programs = {"python": forks.script, "megatron-overlap": forks.cli}
    words[:1] = programs.get(words[0], words[:1])
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}
    done = subprocess.run(words, cwd=folder, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-4000:]
    assert "Traceback" not in done.stderr, done.stderr[-4000:]
    for file in re.findall(r"--(?:json|png|output) (\S+\.\w+)", command):
        assert (folder / file).stat().st_size > 100, file


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("command", "how"), cases())
def test_a_documented_command_runs(
    command: str, how: Short, request: pytest.FixtureRequest, forked_python: ForkedPython
) -> None:
    tree = request.getfixturevalue("complete_tree" if how.long else "tree")
    if "--rehearse" in command and not transformer_engine_available():
        pytest.skip("needs TransformerEngine: bash scripts/setup.sh te")
    run(tree, f"{command} {how.more}", how.codes, forked_python if how.forks else None)
