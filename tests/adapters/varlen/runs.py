"""Trainings on whole documents: real text, several processes, several parallel layouts of the same tokens."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_overlap.config import LaunchConfig
from megatron_overlap.tools.launch.plan import execute, plan
from tests.adapters.megatron_runs import SCRIPTS

TOKENS = 768  # rows of a micro-batch
_NUM_MODULES = 60


def write_text(folder: Path) -> Path:
    """Writes docstrings of the standard library, one file each, and returns the prefix of the prepared data."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    modules = sorted(Path(json.__file__).parents[1].glob("*.py"))[:_NUM_MODULES]
    number = 0
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (text := ast.get_docstring(node)):
                (texts / f"{number:05d}.txt").write_text(text, encoding="utf-8")
                number += 1
    command = [sys.executable, str(SCRIPTS / "prepare_data.py"), str(texts), "--output", str(folder / "data")]
    subprocess.run([*command, "--vocab-size", "500"], check=True, capture_output=True)
    return folder / "data"


def config(
    name: str,
    data: Path,
    *,
    method: str = "balanced",
    context: int = 1,
    tensor: int = 1,
    replicas: int = 1,
    iterations: int = 4,
    arch: str = "llama",
    **train: Any,
) -> LaunchConfig:
    """A tiny model; `train` has further keys of that section."""
    return LaunchConfig.model_validate(
        {
            "name": name,
            "model": {
                "arch": arch,
                "num_layers": 2,
                "hidden_size": 64,
                "ffn_hidden_size": 96,
                "num_attention_heads": 4,
                "num_query_groups": 2,
                "vocab_size": 500,
                "max_position_embeddings": TOKENS,
            },
            "parallel": {"context": context, "tensor": tensor, "sequence_parallel": tensor > 1},
            "train": {
                "seq_length": TOKENS,
                "global_batch_size": 2,
                "iterations": iterations,
                "precision": "fp32",
                "lr": 1e-3,
                "min_lr": 1e-4,
                **train,
            },
            "data": {"kind": "text", "path": str(data)},
            "overlap": {
                "varlen": {"method": method},
                "tensor": {"method": "p2p" if tensor > 1 else "none"},
                "strict": True,
            },
            "launch": {"device": "cpu", "ranks_per_node": context * tensor * replicas, "timeout_s": 240.0},
            # CPU initialisation draws whole weights and then cuts them: the same model in every layout.
            "megatron_args": ["--use-cpu-initialization"],
        }
    )


def train(folder: Path, cfg: LaunchConfig) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
    """Runs the training. Returns the recorded steps of rank 0 by iteration, and the report of every rank."""
    run_dir = folder / cfg.name
    execute(plan(cfg, run_dir))
    lines = (run_dir / "steps-rank0.jsonl").read_text().splitlines()
    reports = [json.loads((run_dir / f"report-rank{rank}.json").read_text()) for rank in range(cfg.world_size)]
    return {row["iteration"]: row for row in map(json.loads, lines)}, reports
