"""The engine on the megatron-core of this process. test_releases.py runs this file again on another release."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import megatron.core
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core import tensor_parallel as parent
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

import megatron_overlap
from megatron_overlap import OverlapConfig
from megatron_overlap.patching import PatchRefusedError, PatchWarning
from megatron_overlap.patching.manifest import Manifest, load_manifests
from tests.patching.conftest import Packages

Future = Callable[[str, str], list[Manifest]]
LINEARS = (layers.ColumnParallelLinear, layers.RowParallelLinear)
OVERLAPPED = {"tensor", "attention", "split", "data", "ulysses", "expert", "consistency", "bucket_order"}
"""Features that the session of this test applies."""
CLASSES = (*LINEARS, Attention, DotProductAttention, MoELayer, TransformerBlock, TransformerLayer)


@pytest.fixture(autouse=True)
def _disable_after_test() -> Iterator[None]:
    yield
    megatron_overlap.disable()


def test_release_is_the_one_that_was_asked_for() -> None:
    assert os.environ.get("EXPECTED_MEGATRON", megatron.core.__version__) == megatron.core.__version__


def test_own_patches_apply_and_leave_nothing_behind(snapshot: Callable[[object], Callable[[], bool]]) -> None:
    same = [snapshot(holder) for holder in (*CLASSES, layers, parallel_state)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", PatchWarning)
        everything = OverlapConfig.model_validate(
            {
                "tensor": {"attention": "query_split", "split": "batch"},
                "ulysses": {"method": "p2p"},
                "expert": {"method": "p2p"},
            }
        )
        session = megatron_overlap.enable(everything, strict=True)
    planned = [manifest for manifest in load_manifests() if manifest.feature in OVERLAPPED]
    expected = {manifest.target: "absent" if manifest.requires else "applies" for manifest in planned}
    assert {line.target: line.verdict for line in session.report().patches} == expected
    assert not any(line.applied for line in session.report().patches if line.verdict == "absent")
    assert DotProductAttention.forward.__module__ == "megatron_overlap.adapters.ulysses.core_attention"
    assert layers.ColumnParallelLinear._forward_impl.__module__ == "megatron_overlap.adapters.tensor_parallel.linear"
    assert layers.RowParallelLinear.forward.__module__ == "megatron_overlap.adapters.tensor_parallel.linear"
    assert Attention.forward.__module__ == "megatron_overlap.adapters.tensor_parallel.attention_projection"
    assert TransformerLayer.forward.__module__ == "megatron_overlap.adapters.tensor_parallel.batch_overlap"
    session.disable()
    assert all(check() for check in same)


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """A real process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_patched_linears_compute_what_the_stock_ones_do(one_rank: dist.ProcessGroup) -> None:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True)
    options = {"config": config, "init_method": torch.nn.init.ones_, "bias": True, "skip_bias_add": False}
    options["tp_group"] = one_rank
    column = layers.ColumnParallelLinear(8, 6, **options)
    row = layers.RowParallelLinear(6, 8, input_is_parallel=True, **options)
    x = torch.randn(3, 2, 8)
    stock = row(column(x)[0])[0]
    with megatron_overlap.enable(strict=True):
        assert torch.equal(row(column(x)[0])[0], stock)


def test_foreign_patch_on_a_megatron_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = layers.RowParallelLinear.forward

    def theirs(self: object, input_: object) -> object:
        return stock(self, input_)

    monkeypatch.setattr(layers.RowParallelLinear, "forward", theirs)
    with pytest.raises(PatchRefusedError, match=r"RowParallelLinear\.forward was already replaced by .*theirs"):
        megatron_overlap.enable(strict=True)
    with pytest.warns(PatchWarning, match="theirs"):
        session = megatron_overlap.enable()
    assert not any(line.applied for line in session.report().patches if line.feature == "tensor")
    assert layers.RowParallelLinear.forward is theirs


@pytest.fixture
def future(packages: Packages, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], list[Manifest]]]:
    """Makes our manifests for layers.py, aimed at a copy of it in which one text became another."""
    name = f"{parent.__name__}.future_layers"
    # A folder more in the package: the copy is imported beside layers.py, and its relative imports work.
    monkeypatch.setattr(parent, "__path__", [*parent.__path__, str(packages.folder)])

    def make(old: str, new: str) -> list[Manifest]:
        assert layers.__file__ is not None
        source = Path(layers.__file__).read_text(encoding="utf-8")
        assert old in source
        (packages.folder / "future_layers.py").write_text(source.replace(old, new))
        importlib.invalidate_caches()
        importlib.import_module(name)
        return [aimed(manifest) for manifest in load_manifests() if manifest.target.startswith(f"{layers.__name__}:")]

    def aimed(manifest: Manifest) -> Manifest:
        moved = manifest.model_dump_json().replace(f"{layers.__name__}:", f"{name}:")
        factory = f"{packages.factories.__name__}:outer"
        return Manifest.model_validate_json(moved).model_copy(update={"replacement": factory})

    yield make
    megatron_overlap.disable()
    del parent.future_layers


def test_copy_of_this_release_applies(future: Future) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", PatchWarning)
        session = megatron_overlap.enable(manifests=future("class RowParallelLinear", "class RowParallelLinear"))
    assert [line.verdict for line in session.report().patches] == ["applies", "applies"]


def test_future_signature_is_refused(future: Future) -> None:
    old = "def _forward_impl(self, input, weight, *args, **kwargs):"
    manifests = future(old, old.replace("weight,", "weight, scale,"))
    with pytest.warns(PatchWarning, match=r"signature \(self, input, weight, scale, \*args, \*\*kwargs\)"):
        session = megatron_overlap.enable(manifests=manifests)
    assert not session.active
    with pytest.raises(PatchRefusedError, match="only .* was reviewed"):
        megatron_overlap.enable(strict=True, manifests=manifests)


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("if not weight.requires_grad:", "if weight.requires_grad is False:", "ColumnParallelLinear._forward_impl"),
        ("            assert self.skip_bias_add\n", "            pass\n", "RowParallelLinear.forward"),
        ("ctx.allreduce_dgrad = allreduce_dgrad", "ctx.allreduce_dgrad = False", "LinearWithGradAccumulation"),
    ],
)
def test_future_body_applies_unreviewed_and_warns(future: Future, old: str, new: str, named: str) -> None:
    manifests = future(old, new)
    with pytest.warns(PatchWarning, match=f"applies unreviewed: .* differs from the reviewed release .* in .*{named}"):
        session = megatron_overlap.enable(manifests=manifests)
    assert session.active
    assert "applies unreviewed" in session.report().render()
