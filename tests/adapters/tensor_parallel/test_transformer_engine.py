"""TransformerEngine's layers: the attributes that the adapter reads exist, and the overlapped forward is correct.

TransformerEngine cannot be imported without a GPU. Its Python sources are read from its wheel, Megatron's from where
they are installed; without the wheel (offline) that test is skipped by name.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.adapters.tensor_parallel import eligibility, transformer_engine
from megatron_overlap.config import ConfigError, load_launch_config
from megatron_overlap.config.megatron_args import TE_OVERLAP
from tests.adapters.megatron_runs import start_ranks
from tests.adapters.tensor_parallel import transformer_engine_workers as cases
from tests.helpers.releases import OLDEST, ROOT, megatron_folder
from tests.helpers.world import World

TE_RELEASE = "2.20.2"
ADAPTER = ast.parse(Path(transformer_engine.__file__).read_text())
ELIGIBILITY = [
    ast.parse(inspect.getsource(function))
    for function in (eligibility.te_communicates, eligibility.unsupported_te_reason)
]
EXTENSION = "megatron/core/extensions/transformer_engine.py"
# Megatron's wrapper, and the class of TransformerEngine below it.
CLASSES = {
    "TEColumnParallelLinear": ("TELinear", "Linear"),
    "TERowParallelLinear": ("TELinear", "Linear"),
    "TELayerNormColumnParallelLinear": ("TELayerNormColumnParallelLinear", "LayerNormLinear"),
}
ONLY_WITH_NORM = {"layer_norm_weight", "layer_norm_bias", "eps"}


@pytest.fixture(scope="session")
def engine() -> dict[str, ast.Module]:
    """TransformerEngine's linears, parsed."""
    folder = ROOT / ".cache" / "transformer_engine"
    wheel = folder / f"transformer_engine-{TE_RELEASE}-py3-none-any.whl"
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        command += ["--disable-pip-version-check", "--dest", str(folder), f"transformer_engine=={TE_RELEASE}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode != 0:
            pytest.skip(f"TransformerEngine's sources cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}")
    with zipfile.ZipFile(wheel) as archive:
        names = ("base", "linear", "layernorm_linear", "layernorm", "rmsnorm")
        return {n: ast.parse(archive.read(f"transformer_engine/pytorch/module/{n}.py")) for n in names}


def read_of(tree: ast.AST, name: str) -> set[str]:
    """Attributes of the variable `name` that a piece of code reads."""
    nodes = [n for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)]
    found = {n.attr for n in nodes if isinstance(n.value, ast.Name) and n.value.id == name}
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "getattr":
            of, attribute = call.args[:2]
            if isinstance(of, ast.Name) and of.id == name and isinstance(attribute, ast.Constant):
                found.add(str(attribute.value))
    return found


def set_in(tree: ast.Module, name: str) -> set[str]:
    """Attributes that a class gives itself: assigned, or registered as a parameter by name."""
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    found = {
        node.attr
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and getattr(node.value, "id", "") == "self"
    }
    for call in ast.walk(cls):
        if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "register_parameter":
            found |= {a.value for a in call.args[:1] if isinstance(a, ast.Constant)}
    # Weights and biases are registered under the names of a list.
    lists = [n.value for n in ast.walk(cls) if isinstance(n, ast.Assign) and isinstance(n.value, ast.List)]
    return found | {e.value for items in lists for e in items.elts if isinstance(e, ast.Constant)}


def arguments_of(tree: ast.Module, name: str, method: str) -> list[str]:
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    (function,) = (n for n in cls.body if isinstance(n, ast.FunctionDef) and n.name == method)
    return [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]


def megatron_extension(release: str) -> ast.Module:
    """Megatron's own wrappers, parsed and not imported."""
    if release == "installed":
        (core,) = importlib.util.find_spec("megatron.core").submodule_search_locations  # type: ignore[union-attr]
        return ast.parse((Path(core).parents[1] / EXTENSION).read_text())
    return ast.parse((megatron_folder(release) / EXTENSION).read_text())


@pytest.mark.parametrize("release", ["installed", OLDEST])
@pytest.mark.parametrize("name", CLASSES)
def test_every_attribute_that_is_read_exists(engine: dict[str, ast.Module], name: str, release: str) -> None:
    megatron = megatron_extension(release)
    wrapper, below = CLASSES[name]
    file = "layernorm_linear" if below == "LayerNormLinear" else "linear"
    there = set_in(engine["base"], "TransformerEngineBaseModule") | set_in(engine[file], below)
    there |= set_in(megatron, wrapper) | set_in(megatron, name)
    read = set().union(*(read_of(tree, "layer") for tree in (ADAPTER, *ELIGIBILITY)))
    assert {"tp_group", "parallel_mode", "te_return_bias", "weight", "layer_norm_weight"} <= read
    if below == "Linear":
        read -= ONLY_WITH_NORM
    torch_attributes = {"__dict__"}
    assert read - there - torch_attributes == set()
    # The forward that is replaced takes one input.
    assert arguments_of(megatron, wrapper, "forward") == ["self", "x"]


def test_the_norm_has_the_arguments_that_are_passed(engine: dict[str, ast.Module]) -> None:
    for name, kind in (("layernorm", "LayerNorm"), ("rmsnorm", "RMSNorm")):
        assert {"eps", "sequence_parallel", "zero_centered_gamma"} <= set(arguments_of(engine[name], kind, "__init__"))
    for release in ("installed", OLDEST):
        megatron = megatron_extension(release)
        assert {"config", "hidden_size", "eps"} <= set(arguments_of(megatron, "TENorm", "__new__"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[World]:
    """Workers of their own: Megatron's groups, once made in a process, stay."""
    workers = World(2, answer_s=240, sizes=(2,), adapted=True)
    yield workers
    workers.close()


@pytest.mark.parametrize("skip_bias_add", [False, True])
@pytest.mark.parametrize("parallel", [True, False], ids=["sp", "no-sp"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_equal_to_the_reference(ranks: World, kind: str, parallel: bool, skip_bias_add: bool) -> None:
    for directions in ranks.run(2, cases.against_reference, kind, parallel, skip_bias_add):
        assert directions == ["dgrad", "forward", "wgrad"]


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("config.fp8", "hybrid", "fp8: TransformerEngine quantizes its messages"),
        ("config.tp_comm_overlap", True, "--tp-comm-overlap: TransformerEngine overlaps communication itself"),
        ("config.delay_wgrad_compute", True, "deferred weight gradient (--delay-wgrad-compute)"),
        ("te_quant_params", "a recipe", "a quantization recipe names this layer"),
        ("weight.overwrite_main_grad", True, "the weight gradient overwrites main_grad"),
        ("weight_names", ["q", "k"], "the weight is split into several parameters"),
        ("rows", None, "sequence length is not divisible by the tensor-parallel size 2"),
        ("parallel_mode", None, None),
    ],
)
def test_an_unsupported_layer_runs_the_stock_forward(ranks: World, field: str, value: Any, reason: str | None) -> None:
    for returned, reasons in ranks.run(2, cases.falls_back, field, value):
        assert returned == cases.STOCK
        assert reasons == ([reason] if reason else [])


def test_tp_comm_overlap_together_with_the_plugin_is_an_error(tmp_path: Path) -> None:
    argument = f"megatron_args=[{TE_OVERLAP}]"
    config = ROOT / "configs" / "llama3_8b_tp8_overlap.yaml"
    engine = "train.transformer_impl=transformer_engine"
    with pytest.raises(ConfigError, match=r"megatron_args.0: --tp-comm-overlap: .*overlap.tensor.method=none"):
        load_launch_config(config, [engine, argument])
    assert load_launch_config(config, [engine, argument, "overlap.tensor.method=none"])
    assert load_launch_config(config, [engine, "overlap.tensor.method=p2p"])
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('must not run')\n")
    (done,) = start_ranks(1, [str(script), TE_OVERLAP], timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert "remove the flag, or use overlap.tensor.method=none" in done.stdout
