"""The examples of docs/launch.md: the names that they use exist, and the example without a GPU trains."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import megatron_overlap
from megatron_overlap.config import load_launch_config
from megatron_overlap.config.megatron_args import to_megatron_args
from tests.helpers.releases import ROOT

EXAMPLES = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "launch.md").read_text(), flags=re.DOTALL)
(BRIDGE,) = (example for example in EXAMPLES if "megatron.bridge" in example)
(NEMO_RUN,) = (example for example in EXAMPLES if "nemo_run" in example)
RELEASES = ("nemo_run==0.11.1", "megatron-bridge==0.6.2")


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_examples_use_existing_names(example: str) -> None:
    for node in ast.walk(ast.parse(example)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "megatron_overlap":
            assert hasattr(megatron_overlap, node.attr)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of both packages, without installation."""
    folder = tmp_path_factory.mktemp("sources")
    cache = ROOT / ".cache" / "recipes"
    if len(list(cache.glob("*.whl"))) < len(RELEASES):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", str(cache), *RELEASES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            pytest.skip(f"NeMo-Run and Megatron Bridge cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    for wheel in cache.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    return folder


def names_in(path: Path) -> set[str]:
    """Names that a module defines or imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def fields(folder: Path, name: str) -> set[str]:
    """Fields of the class, or parameters of the function, with this name in the package."""
    found = set()
    for path in folder.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not re.search(rf"^(class|def) {name}\b", text, flags=re.MULTILINE):
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                found |= {
                    s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
                }
            if isinstance(node, ast.FunctionDef) and node.name == name:
                found |= {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}
    return found


def test_megatron_bridge_has_what_its_example_uses(sources: Path) -> None:
    tree = ast.parse(BRIDGE)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert len(imports) == 3
    for node in imports:
        assert node.module is not None
        path = sources.joinpath(*node.module.split("."))
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert {alias.name for alias in node.names} <= names_in(module)
    bridge = sources / "megatron" / "bridge" / "training"
    assert "comm_overlap" in fields(bridge, "ConfigContainer")
    assert "tp_comm_overlap" in fields(bridge, "CommOverlapConfig")
    assert {"config", "forward_step_func"} <= fields(bridge, "pretrain")


def test_nemo_run_has_what_its_example_uses(sources: Path) -> None:
    calls = [node for node in ast.walk(ast.parse(NEMO_RUN)) if isinstance(node, ast.Call)]
    assert len(calls) == 3
    for call in calls:
        assert isinstance(call.func, ast.Attribute)
        known = fields(sources / "nemo_run", call.func.attr) | fields(sources / "nemo_run", "Executor")
        assert {keyword.arg for keyword in call.keywords} <= known, ast.unparse(call.func)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_nemo_run_trains_on_two_cpu_ranks(tmp_path: Path) -> None:
    """The example as it is, but for the number of ranks and the arguments of the training."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", RELEASES[0], "leptonai<0.28"]
    done = subprocess.run(install, text=True, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"NeMo-Run cannot be installed: {done.stderr.strip().splitlines()[-1:]}")
    # torch, Megatron and this package are those of the environment that runs the tests; NeMo-Run's own come first.
    (own,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    (own / "shared.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    (tmp_path / "overlap.yaml").write_text("overlap: {tensor: {method: p2p}}\nlaunch: {device: cpu}\n")
    tiny = ("model.num_layers=1", "train.seq_length=64", "train.iterations=3")
    arguments = to_megatron_args(load_launch_config(ROOT / "configs" / "cpu/gpt_tp2/overlap.yaml", tiny))
    example = NEMO_RUN.replace('"--tensor-model-parallel-size", "8"', ", ".join(map(repr, arguments)))
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    example = example.replace('"pretrain_gpt.py"', repr(script)).replace("ntasks_per_node=8", "ntasks_per_node=2")
    (tmp_path / "example.py").write_text(example)
    path = os.pathsep.join([str(python.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "NEMORUN_HOME": str(tmp_path / "home"), "COLUMNS": "200"}
    done = subprocess.run(
        [str(python), "example.py"], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
    )
    said = done.stdout + done.stderr
    assert "finished: SUCCEEDED" in said, said[-4000:]
    assert re.search(r"iteration +3/ +3", said)
    assert re.search(r"│ column .*│ forward +│ +6 │", said), said[-6000:]
