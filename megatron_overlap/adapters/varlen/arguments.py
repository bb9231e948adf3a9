"""Checks Megatron's arguments for options that balanced attention does not support, before the model is built.

`config/validation.py` checks launch configurations, before the processes start.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_overlap.adapters.varlen.core_attention import VarlenError
from megatron_overlap.config.validation import REFUSED_FLAGS

# Values of an argument that is not set.
_OFF: tuple[Any, ...] = (None, False, 0, (), [], "none", "")


def refuse(args: Any, method: str) -> None:
    """Refuses the first argument that `overlap.varlen` does not support.

    Args:
        args: Megatron's arguments.
        method: `overlap.varlen.method`.

    Raises:
        VarlenError: one line: the flag, its value, the reason or remedy.
    """
    for flag, value, reason in _problems(args, method):
        raise VarlenError(f"{flag}: {value}: not with overlap.varlen: {reason}")


def _problems(args: Any, method: str) -> Iterator[tuple[str, Any, str]]:
    for flag, reason in REFUSED_FLAGS.items():
        value = getattr(args, flag.removeprefix("--").replace("-", "_"), None)
        if flag == "--dataloader-type":
            if value != "external":
                yield flag, value, "documents come from a loader of the plugin: use external"
        elif value not in _OFF:
            yield flag, value, f"{reason}; leave it out"
    required: tuple[tuple[str, Any, str], ...] = (
        ("--pipeline-model-parallel-size", 1, "pipeline stages do not pass the plan on: use 1"),
        ("--micro-batch-size", 1, "a micro-batch is one row of whole documents, --seq-length tokens at most: use 1"),
        ("--calculate-per-token-loss", True, "ranks hold different numbers of tokens: add it"),
        ("--transformer-impl", "local", "it uses another core attention: use local"),
        ("--attention-dropout", 0.0, "use 0"),
    )
    for flag, value, reason in required:
        found = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if found != value:
            yield flag, found, reason
    if args.position_embedding_type not in ("rope", "learned_absolute"):
        yield "--position-embedding-type", args.position_embedding_type, "use rope or learned_absolute"
    if method == "masked" and args.context_parallel_size > 1:
        yield (
            "--context-parallel-size",
            args.context_parallel_size,
            "method masked uses stock attention, which has no context parallelism: use 1",
        )
    if args.mock_data:
        yield "--mock-data", True, "it reads documents: use --data-path"
    if len(args.data_path or ()) != 1:
        yield "--data-path", args.data_path, "give the prefix of one .bin/.idx pair"
    for name, off in (("softmax_type", "vanilla"), ("experimental_attention_variant", None), ("qk_clip", False)):
        found = getattr(args, name, off)
        if found != off:
            yield f"--{name.replace('_', '-')}", found, "balanced attention does not support it; leave it out"
