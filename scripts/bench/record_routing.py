"""Trains a mixture of experts and records how many tokens of each sequence each layer sends to each expert.

    python scripts/prepare_data.py --output data/stdlib
    python scripts/bench/record_routing.py --data data/stdlib --json docs/results/routing.json
    python scripts/bench/expert_parallel.py --hosts 4 --routing docs/results/routing.json

A LLaMA of two layers with 16 experts, two of them per token, on one CPU rank. In the benchmark each sequence is a rank.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

LAYERS, EXPERTS, SEQUENCES, TOKENS = 2, 16, 4, 512
STEPS = (1, 100, 300)
"""Recorded steps; the last one ends the training."""
FILE = "RECORD_ROUTING"
"""Environment variable: where the rank writes."""


class Recorder:
    """A forward hook of all modules, which records the calls of routers."""

    def __init__(self, path: Path) -> None:
        self._path, self._calls, self._samples = path, 0, list[dict[str, Any]]()

    def __call__(self, module: Any, _: Any, output: Any) -> None:
        if type(module).__name__ != "TopKRouter":
            return
        step, layer = 1 + self._calls // LAYERS, 1 + self._calls % LAYERS
        self._calls += 1
        if step in STEPS:
            # [tokens of a sequence, sequences, experts]
            counts = output[1].reshape(TOKENS, SEQUENCES, EXPERTS).sum(0).tolist()
            self._samples.append({"step": step, "layer": layer, "counts": counts})
            self._path.write_text(json.dumps(self._samples))


def train() -> None:
    """The training of one rank."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from pretrain_llama import LLAMA, pretrain_decoder

    torch.nn.modules.module.register_module_forward_hook(Recorder(Path(os.environ[FILE])))
    pretrain_decoder(LLAMA)


def main() -> None:
    """Launches the training and writes the samples."""
    from megatron_overlap.config import LaunchConfig
    from megatron_overlap.tools.launch.plan import execute, plan

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/stdlib"), help="folder made by prepare_data.py")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs/record_routing"), help="folder of the training; replaced"
    )
    parser.add_argument("--json", type=Path, required=True, help="write the samples here")
    options = parser.parse_args()
    shutil.rmtree(options.runs, ignore_errors=True)
    options.runs.mkdir(parents=True)
    samples = options.runs.resolve() / "samples.json"
    config = LaunchConfig.model_validate(
        {
            "name": "record_routing",
            "model": {
                "arch": "llama",
                "num_layers": LAYERS,
                "hidden_size": 128,
                "ffn_hidden_size": 128,
                "num_attention_heads": 8,
                "vocab_size": 4000,
                "max_position_embeddings": TOKENS,
            },
            "train": {
                "seq_length": TOKENS,
                "micro_batch_size": SEQUENCES,
                "global_batch_size": SEQUENCES,
                "iterations": STEPS[-1],
                "lr": 1e-3,
                "min_lr": 1e-4,
                "lr_warmup_iterations": 10,
            },
            "data": {"kind": "text", "path": str(options.data.resolve())},
            "overlap": {"tensor": {"method": "none"}, "data": {"method": "stock"}},
            "launch": {
                "device": "cpu",
                "ranks_per_node": 1,
                "timeout_s": 3600.0,
                "entry": str(Path(__file__).resolve()),
            },
            "megatron_args": [
                *("--num-experts", EXPERTS, "--moe-router-topk", 2),
                *("--moe-router-load-balancing-type", "aux_loss", "--moe-aux-loss-coeff", 0.01),
            ],
        }
    )
    os.environ[FILE] = str(samples)
    execute(plan(config, options.runs.resolve() / "training"))
    found = json.loads(samples.read_text())
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"command": " ".join(["python", *sys.argv]), "samples": found}) + "\n")
    for sample in found:
        largest = max(max(row) for row in sample["counts"]) * EXPERTS / (2 * TOKENS)
        print(f"step {sample['step']}, layer {sample['layer']}: largest share of an expert {largest:.2f} x the mean")


if __name__ == "__main__":
    if FILE in os.environ:
        train()
    else:
        main()
