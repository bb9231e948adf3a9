"""What CPU ranks permit and a GPU does not: a small training without one adaptation ends as its entry says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_overlap.config import ConfigError
from megatron_overlap.patching import manifest as manifest_module
from megatron_overlap.patching.manifest import load_manifests, load_permits
from tests.adapters.megatron_runs import NO_GPU, SCRIPTS, TE_LAYERS, TINY, TP2_SP, start_ranks
from tests.helpers.te import needs_te

PERMITS = {permit.name: permit for permit in load_permits()}
WORKER = Path(__file__).with_name("left_out_worker.py")
ADAM = ("--use-distributed-optimizer", "--ckpt-format", "torch")
long = pytest.mark.long


def output_without(entry: str, *args: str, fused: str | None = None, ranks: int = 1) -> str:
    """What a tiny training prints without the adaptation `entry`; without the switch `fused` if it is given."""
    switches = [switch for switch in NO_GPU if switch != fused]
    argv = [entry, str(SCRIPTS / "pretrain_gpt.py"), *switches, *TINY, "--bf16", *args]
    return "\n".join(done.stdout for done in start_ranks(ranks, argv, timeout_s=300, program=[str(WORKER)]))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the run would take the GPU")
@pytest.mark.parametrize(
    ("entry", "args", "changed"),
    [
        pytest.param("devices", [], {}),
        pytest.param("tensors", [], {}, marks=long),
        pytest.param("streams", [], {}, marks=long),
        pytest.param("memory", [], {}, marks=long),
        pytest.param("random", [], {}, marks=long),
        pytest.param("compile", [], {}, marks=long),
        pytest.param("process_groups", ["--distributed-backend", "nccl"], {}, marks=long),
        pytest.param("torch_norm", TP2_SP, {"ranks": 2}),
        pytest.param("arguments", [], {"fused": "--no-gradient-accumulation-fusion"}),
        pytest.param("arguments", [], {"fused": "--no-masked-softmax-fusion"}, marks=long),
        pytest.param(
            "arguments",
            [*TE_LAYERS, "--position-embedding-type", "rope"],
            {"fused": "--no-rope-fusion"},
            marks=[long, needs_te],
        ),
        pytest.param("te_kernels", TE_LAYERS, {}, marks=needs_te),
    ],
)
def test_a_run_without_it_ends_as_the_entry_says(entry: str, args: list[str], changed: dict[str, Any]) -> None:
    output = output_without(entry, *args, **changed)
    assert re.search(PERMITS[entry].without, output), output[-3000:]


@long
def test_a_checkpoint_of_adam_without_its_adaptation(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert "successfully saved" in output_without("no entry", *ADAM, "--save", folder, "--save-interval", "4")
    output = output_without("adam", *ADAM, "--load", folder, "--train-iters", "6")
    assert re.search(PERMITS["adam"].without, output), output[-3000:]


def test_every_patch_of_the_cpu_has_an_entry() -> None:
    ours = {manifest.target for manifest in load_manifests() if manifest.feature.startswith("cpu_")}
    assert ours == {target for permit in PERMITS.values() for target in permit.targets}


def test_a_file_without_an_entry_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "new.yaml").write_text("targets: {}\n")
    monkeypatch.setattr(manifest_module, "resource_folder", lambda folder: tmp_path)
    with pytest.raises(ConfigError, match=r"new\.yaml: permits\.\w+: .*: Field required"):
        load_permits()
