"""What the CPU adapter replaces, and that it takes all of it back."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from megatron_overlap.adapters.cpu import MEGATRON, TORCH
from megatron_overlap.adapters.cpu.patcher import Adaptation, Applied, _resolve


@pytest.fixture
def adapted() -> Iterator[None]:
    applied = Applied()
    applied.apply(TORCH)
    yield
    applied.revert()


def _asked_from(module: str, expression: str) -> Any:
    return eval(f"(lambda: {expression})()", {"__name__": module, "torch": torch})


def test_megatron_sees_a_gpu_and_torch_hears_the_truth() -> None:
    truth = torch.cuda.is_available()
    applied = Applied()
    applied.apply(TORCH)
    try:
        assert _asked_from("torch.optim.adam", "torch.cuda.is_available()") is truth
        assert _asked_from("megatron.core.utils", "torch.cuda.is_available()") is True
        assert _asked_from("__main__", "torch.cuda.device_count()") == 1
        assert _asked_from("megatron.core", "torch.ones(1).type()") == "torch.cuda.FloatTensor"
        assert _asked_from("somewhere", "torch.ones(1).type()") == "torch.FloatTensor"
    finally:
        applied.revert()


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
def test_tensors_asked_for_on_cuda_are_on_the_cpu(make: Any) -> None:
    assert make().device.type == "cpu"


@pytest.mark.usefixtures("adapted")
def test_making_a_data_iterator_leaves_the_generator_alone() -> None:
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


def test_every_original_comes_back() -> None:
    def entries() -> list[Any]:
        found = []
        for adaptation in TORCH:
            owner, name = _resolve(adaptation.target)
            found.append(vars(owner).get(name))
        return found

    before = entries()
    applied = Applied()
    applied.apply(TORCH)
    assert all(now is not was for now, was in zip(entries(), before, strict=True))
    applied.revert()
    assert all(now is was for now, was in zip(entries(), before, strict=True))


def test_a_target_that_does_not_exist_is_an_error_unless_optional() -> None:
    missing = Adaptation("torch.cuda:no_such_thing", lambda original: None, "test")
    with pytest.raises(AttributeError):
        Applied().apply([missing])
    Applied().apply([Adaptation(missing.target, missing.make, missing.why, optional=True)])
    assert not hasattr(torch.cuda, "no_such_thing")


def test_every_adaptation_says_why() -> None:
    targets = [adaptation.target for adaptation in (*TORCH, *MEGATRON)]
    assert len(set(targets)) == len(targets)
    assert all(adaptation.why for adaptation in (*TORCH, *MEGATRON))


def test_it_refuses_to_come_after_megatron() -> None:
    # A module of that name is what it looks for; importing the real one takes seconds.
    before = "import sys, types; sys.modules['megatron.core'] = types.ModuleType('megatron.core')"
    code = f"{before}\nfrom megatron_overlap.adapters import cpu\ncpu.install()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "must come before it" in done.stderr


def test_importing_the_adapter_changes_nothing() -> None:
    stand_ins = importlib.import_module("megatron_overlap.adapters.cpu.cuda_stubs")
    assert torch.cuda.Stream is not stand_ins.Stream
    assert torch.Tensor.to is torch._C.TensorBase.to
