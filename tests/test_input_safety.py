"""Input files are data: the package evaluates no code from them and passes none to a shell."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_overlap.config import ConfigError, OverlapConfig

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted([*(ROOT / "megatron_overlap").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])
FORBIDDEN_MODULES = {"pickle", "shelve", "marshal", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN_CALLS |= {"torch.load", "subprocess.getoutput"}


def offences(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {each.name}" for each in node.names if each.name.split(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            yield f"from {node.module}"
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            shell = [each for each in node.keywords if each.arg == "shell" and ast.unparse(each.value) != "False"]
            # A loader class of this package is checked by its base class.
            safe = name == "yaml.load" and any(
                "Safe" in ast.unparse(each) or "_Loader" in ast.unparse(each) for each in node.args
            )
            if (name in FORBIDDEN_CALLS and not safe) or shell:
                yield f"line {node.lineno}: {ast.unparse(node)[:100]}"


@pytest.mark.parametrize("source", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_evaluates_or_starts_a_shell(source: Path) -> None:
    assert list(offences(ast.parse(source.read_text(encoding="utf-8")))) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "eval(x)",
        "import subprocess\nsubprocess.run(x, shell=True)",
        "yaml.load(x, yaml.Loader)",
        "torch.load(x)",
    ],
)
def test_the_search_finds_every_forbidden_form(text: str) -> None:
    assert list(offences(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "tensor: !!python/object/apply:os.system ['touch {canary}']",
        "tensor: !!python/name:os.system",
        "strict: ${{oc.eval:__import__('os').system('touch {canary}')}}",
    ],
)
def test_a_config_runs_no_code(text: str, tmp_path: Path) -> None:
    canary, config = tmp_path / "canary", tmp_path / "config.yaml"
    config.write_text(text.format(canary=canary))
    with pytest.raises(ConfigError):
        OverlapConfig.from_yaml(config)
    assert not canary.exists()


def test_an_override_is_not_interpreted_by_a_shell(tmp_path: Path) -> None:
    """An argument of a config reaches the program as one word."""
    from megatron_overlap.config import load_launch_config
    from megatron_overlap.config.megatron_args import to_megatron_args

    canary = tmp_path / "canary"
    config = load_launch_config(
        ROOT / "configs" / "cpu" / "quickstart.yaml",
        ["name=x", f'megatron_args=["--wandb-exp-name=$(touch {canary}); `id`"]'],
    )
    assert any(word == f"--wandb-exp-name=$(touch {canary}); `id`" for word in to_megatron_args(config))
    assert not canary.exists()
