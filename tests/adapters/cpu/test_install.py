"""The CPU patches: what they replace, for whom, and that every original is restored."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_overlap.adapters.cpu import TORCH
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import Manifest, load_manifests
from megatron_overlap.patching.planning import find_loaded
from megatron_overlap.patching.source import Target
from tests.adapters.megatron_runs import start_ranks

TORCH_PATCHES = [manifest for manifest in load_manifests() if manifest.feature == TORCH]


@pytest.fixture
def adapted() -> Iterator[Engine]:
    """torch with the CPU patches."""
    engine = Engine(TORCH_PATCHES)
    engine.apply(engine.plan(), None)
    yield engine
    engine.revert()


def _called_from(module: str, expression: str) -> Any:
    return eval(f"(lambda: {expression})()", {"__name__": module, "torch": torch})


def test_megatron_sees_a_gpu_and_other_code_gets_the_true_answer() -> None:
    truth = torch.cuda.is_available()
    engine = Engine(TORCH_PATCHES)
    engine.apply(engine.plan(), None)
    try:
        assert _called_from("torch.optim.adam", "torch.cuda.is_available()") is truth
        assert _called_from("megatron.core.utils", "torch.cuda.is_available()") is True
        assert _called_from("__main__", "torch.cuda.device_count()") == 1
        assert _called_from("megatron.core", "torch.ones(1).type()") == "torch.cuda.FloatTensor"
        assert _called_from("somewhere", "torch.ones(1).type()") == "torch.FloatTensor"
    finally:
        engine.revert()


@pytest.mark.usefixtures("adapted")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.empty(2, device=torch.device("cuda", 0)),
        lambda: torch.tensor([1.0], device=torch.cuda.current_device(), pin_memory=True),
        lambda: torch.ones(2).to("cuda:0"),
        lambda: torch.ones(2).to(device=torch.device("cuda")),
        lambda: torch.ones(2).cuda(non_blocking=True).pin_memory(),
        lambda: torch.nn.Linear(2, 2).cuda(torch.cuda.current_device()).weight,
    ],
)
def test_tensors_for_cuda_are_made_on_the_cpu(make: Any) -> None:
    assert make().device.type == "cpu"


@pytest.mark.usefixtures("adapted")
def test_making_a_data_iterator_keeps_the_random_state() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert len(list(DataLoader([torch.ones(1)] * 3, num_workers=0))) == 3
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("adapted")
def test_the_stream_context_may_be_entered_again() -> None:
    context = torch.cuda.stream(torch.cuda.Stream())
    for _ in range(2):
        with context:
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with pytest.raises(ValueError, match="recorded"):
        start.elapsed_time(end)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0.0


def test_every_original_is_restored() -> None:
    def entries() -> list[Any]:
        return [_value(manifest) for manifest in TORCH_PATCHES]

    before = entries()
    engine = Engine(TORCH_PATCHES)
    engine.apply(engine.plan(), None)
    assert all(now is not original for now, original in zip(entries(), before, strict=True))
    engine.revert()
    assert all(now is original for now, original in zip(entries(), before, strict=True))


def _value(manifest: Manifest) -> Any:
    binding = find_loaded(Target.parse(manifest.target))
    assert binding is not None
    return binding.read()


def test_install_after_megatron_is_refused() -> None:
    # The check looks for a module of this name; importing Megatron takes seconds.
    before = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')"
    code = f"{before}\nfrom megatron_overlap.adapters import cpu\ncpu.install()"
    (done,) = start_ranks(1, [], program=("-c", code))
    assert done.returncode == 1
    assert "must come before it" in done.stdout


def test_install_patches_megatron_too_and_revert_restores_everything() -> None:
    code = """
import torch
from megatron_overlap.adapters import cpu

original = torch.cuda.is_available
engine = cpu.install()
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.transformer.torch_norm import WrappedTorchNorm

assert DistributedOptimizer.state_dict.__module__ == "megatron_overlap.adapters.cpu.patches"
assert WrappedTorchNorm.__new__.__module__ == "megatron_overlap.adapters.cpu.patches"
assert len(engine.applied) == len(engine.manifests)
engine.revert()
assert torch.cuda.is_available is original
assert DistributedOptimizer.state_dict.__module__ == DistributedOptimizer.__module__
assert WrappedTorchNorm.__new__.__module__ == WrappedTorchNorm.__module__
assert engine.applied == []
"""
    (done,) = start_ranks(1, [], program=("-c", code))
    assert done.returncode == 0, done.stdout


def test_importing_the_adapter_changes_nothing() -> None:
    stubs = importlib.import_module("megatron_overlap.adapters.cpu.cuda_stubs")
    assert torch.cuda.Stream is not stubs.Stream
    assert torch.Tensor.to is torch._C.TensorBase.to


def test_a_process_of_the_checkpoint_does_not_run_the_training_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing
from megatron_overlap.adapters.cpu import TORCH
from megatron_overlap.patching.engine import Engine
from megatron_overlap.patching.manifest import load_manifests

assert __name__ == "__main__", "the script runs in another process"
engine = Engine([each for each in load_manifests() if each.feature == TORCH])
engine.apply(engine.plan({TORCH}), None)
queue = multiprocessing.get_context("spawn").Manager().Queue()
queue.put("saved")
print(queue.get())
"""
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "saved\n", done.stderr
