"""Megatron's own SelfAttention on two ranks, with and without query-split attention."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.adapters.conftest import RANKS
from tests.adapters.megatron_runs import SCRIPTS, TP2_SP, assert_equal_training, train
from tests.adapters.tensor_parallel import attention_projection_workers as cases
from tests.adapters.tensor_parallel.linear_workers import start
from tests.helpers.releases import OLDEST, ROOT, release_environment
from tests.helpers.world import World, assert_same

REASONS = {
    "window": "sliding-window attention",
    "dropout": "attention dropout: add --attention-dropout 0",
    "offset": "the softmax has an offset",
    "selective": "query split does not support recomputation of core attention (--recompute-granularity selective)",
    "context": "context parallelism: a rank does not have all keys",
    "gate": "the attention output is gated",
    "plain": "query split needs --sequence-parallel",
    "padding": "the attention mask is padding, not causal",
    "mask": "an attention mask is given: add --no-create-attention-mask-in-dataloader if it is only causal",
    "hook": "a hook reads the output of the core attention, or a gradient",
    "gradient hook": "a hook reads the output of the core attention, or a gradient",
    "pre-hook": "a hook reads the input or the output of the output projection",
    "backward hook": "a hook reads the input or the output of the output projection",
}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_query_groups": 4},
    {"add_bias_linear": False},
    {"apply_query_key_layer_scaling": True},
    {"softmax_scale": 0.3},
    {"fused": True},
    {"frozen": True},
    {"evaluated": True},
    {"recompute": True},
]
# The dtype changes the sums in main_grad. The other options run the same code in both: the weekly run has them in bf16.
DAILY_IN_BF16: list[dict[str, Any]] = [{}, {"fused": True}]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(
            dtype,
            options,
            id="-".join([name, *options]),
            marks=[] if name == "fp32" or options in DAILY_IN_BF16 else [pytest.mark.long],
        )
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for options in OPTIONS
    ],
)
def test_equal_to_stock(ranks: World, dtype: torch.dtype, options: dict[str, Any]) -> None:
    counts = ranks.run(RANKS, cases.against_stock, dtype, **options)
    assert_same(counts)
    times = {direction: number for op, direction, number, _ in counts[0] if op == "query_split"}
    expected = {"forward": 2 if options.get("recompute") else 1, "dgrad": 1, "wgrad": 1}
    if options.get("frozen"):
        del expected["wgrad"]
    assert times == expected
    # The projection is part of it: no row-parallel layer is left.
    assert not any(op == "gemm_rs" for op, *_ in counts[0])


@pytest.mark.skipif(version("megatron-core") < "0.17", reason="there it needs TransformerEngine")
def test_multi_latent_attention_is_overlapped_layer_by_layer(ranks: World) -> None:
    # Down- and up-projections of queries, and of keys and values; the output projection.
    expected = {("ag_gemm", way): 4 for way in ("forward", "dgrad", "wgrad")}
    expected |= {("gemm_rs", way): 1 for way in ("forward", "dgrad", "wgrad")}
    assert ranks.run(RANKS, cases.latent) == [expected] * RANKS


@pytest.mark.parametrize("what", REASONS)
def test_an_unsupported_layer_runs_the_stock_path(ranks: World, what: str) -> None:
    for reasons, error in ranks.run(RANKS, cases.falls_back, what, False):
        assert reasons == [REASONS[what]]
        assert error == ""


def test_strict_makes_a_fallback_an_error(ranks: World) -> None:
    for reasons, error in ranks.run(RANKS, cases.falls_back, "mask", True):
        assert reasons == [REASONS["mask"]]
        assert error.startswith(f"attention 32->64: query_split forward: not overlapped: {REASONS['mask']};")


def test_an_operation_between_the_modules_is_an_error(ranks: World) -> None:
    for error in ranks.run(RANKS, cases.operation_in_between):
        assert error.startswith("an unknown operation runs between core attention and output projection")
        assert error.endswith("set overlap.tensor.attention to row")


def test_the_expected_release_runs(ranks: World) -> None:
    releases = ranks.run(RANKS, start)
    wanted = os.environ.get("EXPECTED_MEGATRON")
    assert wanted is None or releases == [wanted] * RANKS


@pytest.mark.long
def test_training_is_equal_to_stock(tmp_path: Path) -> None:
    """A LLaMA with grouped queries and rotary positions: every loss and grad-norm, without a fallback."""
    file = tmp_path / "overlap.yaml"
    file.write_text(yaml.safe_dump({"overlap": {"tensor": cases.TENSOR, "strict": True}}))
    layout = ("--group-query-attention", "--num-query-groups", "2", *TP2_SP)
    llama = SCRIPTS / "pretrain_llama.py"
    mine = train(tmp_path / "mine", llama, 2, *layout, "--overlap-config", str(file), off=False)
    assert_equal_training(mine, train(tmp_path / "stock", llama, 2, *layout))
    for rank in range(2):
        report = json.loads((tmp_path / "mine" / f"report-rank{rank}.json").read_text())
        done = {m["direction"]: m["overlapped"] for m in report["modules"] if m["op"] == "query_split"}
        # Two layers, two micro-batches, four iterations: 16 calls.
        assert done == {"forward": 16, "dgrad": 16, "wgrad": 16}


@pytest.mark.long
def test_the_oldest_release() -> None:
    """All tests above except the training on the oldest release; latent attention needs TransformerEngine there."""
    others = "not oldest_release and not training and not dtype1 and not latent"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-k", others],
        cwd=ROOT,
        env={**release_environment(OLDEST), "EXPECTED_MEGATRON": OLDEST},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
