"""The plugin together with other features of Megatron: each trains as stock does, overlapped or with a reason."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from tests.adapters.megatron_runs import SCRIPTS, TP2_SP, assert_equal_training, rows, train

GPT = SCRIPTS / "pretrain_gpt.py"
UNFUSED_LOSS = "--untie-embeddings-and-output-weights"

EXPERTS = "expert layer: the token dispatcher communicates, not the layer"
FEATURES = {
    "full recomputation": (2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
    "selective recomputation": (2, "--recompute-granularity selective"),
    "pipeline": (4, f"--pipeline-model-parallel-size 2 {UNFUSED_LOSS} --micro-batch-size 1"),
    "virtual pipeline": (
        4,
        "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
        f"{UNFUSED_LOSS} --micro-batch-size 1",
    ),
    "batch overlap": (2, "--micro-batch-size 2"),
    "batch overlap of four ranks": (4, "--tensor-model-parallel-size 4"),
    "batch overlap on pipeline stages": (
        4,
        f"--pipeline-model-parallel-size 2 {UNFUSED_LOSS} --micro-batch-size 2 --global-batch-size 8",
    ),
    "batch overlap with full recomputation": (
        2,
        "--micro-batch-size 2 --num-layers 4 "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 2",
    ),
    "batch overlap with selective recomputation": (2, "--micro-batch-size 2 --recompute-granularity selective"),
    "experts": (
        2,
        "--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear",
    ),
}
LEFT = {"experts": {EXPERTS}}
"""Expected fallback reasons by feature; all other features have none."""


@pytest.mark.long
@pytest.mark.parametrize("feature", FEATURES)
def test_trains_as_stock_does(feature: str, tmp_path: Path) -> None:
    ranks, flags = FEATURES[feature]
    layout = (*TP2_SP, *shlex.split(flags))
    config = tmp_path / "overlap.yaml"
    split = "batch" if feature.startswith("batch overlap") else "none"
    overlap = {"tensor": {"method": "p2p", "chunks_per_rank": 2, "split": split}, "strict": feature not in LEFT}
    config.write_text(yaml.safe_dump({"overlap": overlap}))
    train(tmp_path / "stock", GPT, ranks, *layout)
    train(tmp_path / "mine", GPT, ranks, *layout, "--overlap-config", str(config), off=False)
    # With a pipeline the last rank alone has the loss.
    assert_equal_training(rows(tmp_path / "mine", ranks - 1), rows(tmp_path / "stock", ranks - 1))
    for rank in range(ranks):
        report = json.loads((tmp_path / "mine" / f"report-rank{rank}.json").read_text())
        assert report["totals"]["overlapped"] > 0
        assert {reason for module in report["modules"] for reason in module["fallbacks"]} == LEFT.get(feature, set())
