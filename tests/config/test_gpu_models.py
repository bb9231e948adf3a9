"""A machine with GPUs builds the model of every shipped config: norms, attention and argument checks are real."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_overlap.config import load_launch_config
from tests.adapters.megatron_runs import start_ranks
from tests.config.test_shipped import CONFIGS, SHIPPED, short
from tests.helpers.te import needs_te

ON_GPUS = [file for file in SHIPPED if file.is_relative_to(CONFIGS / "gpu")]
REFUSED = {
    "norm": (["train.transformer_impl=local", "megatron_args=[--no-persist-layer-norm]"], "sequence parallel not supp"),
    "persistent norm": (["train.transformer_impl=local"], "persist_layer_norm not supported by torch LayerNorm"),
}


@pytest.fixture(scope="module")
def built() -> dict[str, Any]:
    """The classes of the model of every config, or the error."""
    # Models are built without the plugin, whose core attention for documents needs the other ranks.
    request = {short(file): (str(file), ["overlap.varlen.method=none"]) for file in ON_GPUS}
    request |= {name: (str(CONFIGS / "gpu/llama3_8b_tp8/overlap.yaml"), REFUSED[name][0]) for name in REFUSED}
    program = ("-m", "tests.config.gpu_machine")
    (done,) = start_ranks(1, [json.dumps(list(request.values()))], program=program, timeout_s=280)
    assert done.returncode == 0, done.stdout
    answers = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[{")))
    return dict(zip(request, answers, strict=True))


@needs_te
@pytest.mark.parametrize("file", ON_GPUS, ids=short)
def test_a_gpu_machine_builds_the_model(built: dict[str, Any], file: Path) -> None:
    classes = built[short(file)]
    assert isinstance(classes, dict), classes
    attention = {kind for name, kind in classes.items() if name.endswith("core_attention")}
    norms = {kind for kind in classes.values() if "Norm" in kind}
    assert attention == {"TEDotProductAttention"}
    assert norms == {"TELayerNormColumnParallelLinear", load_launch_config(file).model.normalization}


@needs_te
@pytest.mark.parametrize("case", REFUSED)
def test_a_gpu_machine_refuses_what_only_the_cpu_adaptation_permits(built: dict[str, Any], case: str) -> None:
    assert REFUSED[case][1] in built[case]
