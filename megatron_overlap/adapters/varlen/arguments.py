"""What balanced attention cannot do in Megatron, by its arguments: looked at before a model is built.

`config/varlen_validation.py` says the same of launch configs, before anything is started.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_overlap.adapters.varlen.core_attention import VarlenError
from megatron_overlap.config.validation import REFUSED_FLAGS

# Values that mean "not asked for", whatever the argument.
_OFF: tuple[Any, ...] = (None, False, 0, (), [], "none", "")


def refuse(args: Any, method: str) -> None:
    """Refuses the first argument that does not go with `overlap.varlen`.

    Args:
        args: Megatron's.
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
    wanted: tuple[tuple[str, Any, str], ...] = (
        ("--pipeline-model-parallel-size", 1, "stages would need the plan: use 1"),
        ("--micro-batch-size", 1, "a micro-batch is one row of whole documents, --seq-length tokens at most: use 1"),
        ("--calculate-per-token-loss", True, "ranks hold different numbers of tokens: add it"),
        ("--transformer-impl", "local", "its attention would not be ours: use local"),
        ("--attention-dropout", 0.0, "use 0"),
    )
    for flag, value, reason in wanted:
        found = getattr(args, flag.removeprefix("--").replace("-", "_"))
        if found != value:
            yield flag, found, reason
    if args.position_embedding_type not in ("rope", "learned_absolute"):
        yield "--position-embedding-type", args.position_embedding_type, "use rope or learned_absolute"
    if method == "masked" and args.context_parallel_size > 1:
        yield (
            "--context-parallel-size",
            args.context_parallel_size,
            "with method masked Megatron's own attention runs, which has none: use 1",
        )
    if args.mock_data:
        yield "--mock-data", True, "it reads documents: use --data-path"
    if len(args.data_path or ()) != 1:
        yield "--data-path", args.data_path, "give the prefix of one .bin/.idx pair"
    for name, off in (("softmax_type", "vanilla"), ("experimental_attention_variant", None), ("qk_clip", False)):
        found = getattr(args, name, off)
        if found != off:
            yield f"--{name.replace('_', '-')}", found, "its attention is another one; leave it out"
