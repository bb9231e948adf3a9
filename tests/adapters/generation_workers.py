"""Worker functions of test_generation.py: Megatron's inference engines with and without the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from megatron_overlap import OverlapConfig, enable
from megatron_overlap.adapters.tensor_parallel import forward_only
from scripts.bench.gpt import build_gpt
from tests.adapters.tensor_parallel.linear_workers import start

VOCABULARY, HIDDEN = 64, 32


@dataclass(frozen=True)
class Case:
    """One model, engine and method.

    Attributes:
        engine: `static` or `dynamic`.
        sp: sequence parallelism.
        tensor: `overlap.tensor`.
        te: TransformerEngine layers.
        llama: RMSNorm, SwiGLU and grouped queries instead of a GPT.
        prompts: their number; their lengths differ.
        new_tokens: generated from each.
        threshold: rows from which `method: auto` overlaps; None measures.
    """

    engine: str
    sp: bool = False
    tensor: Any = None
    te: bool = False
    llama: bool = False
    prompts: int = 3
    new_tokens: int = 6
    threshold: float | None = None


class Tokens(NamedTuple):
    """The tokens of the stock path and of the plugin, the engine that ran, and the calls of the report."""

    stock: list[list[int]]
    mine: list[list[int]]
    engine: str
    calls: list[dict[str, Any]]
    not_overlapped: dict[str, str]


def make_model(group: dist.ProcessGroup, case: Case) -> Any:
    """A small GPT or LLaMA in fp32, with the same weights on every call."""
    return build_gpt(
        ranks=group.size(),
        sp=case.sp,
        dtype=torch.float32,
        vocabulary=VOCABULARY,
        max_tokens=128,
        te=case.te,
        llama=case.llama,
        num_layers=2,
        hidden_size=HIDDEN,
        ffn_hidden_size=2 * HIDDEN,
        num_attention_heads=4,
        init_method_std=0.3,
    )


def make_prompts(count: int) -> list[str]:
    """Ragged prompts of 5 to 23 tokens."""
    generator = torch.Generator().manual_seed(3)
    lengths = [5 + 7 * number % 19 for number in range(count)]
    return [" ".join(map(str, torch.randint(2, VOCABULARY, (n,), generator=generator).tolist())) for n in lengths]


def tokens(group: dist.ProcessGroup, case: Case) -> Tokens:
    """Generates with the stock path and with the plugin."""
    start(group)
    from scripts.generate_gpt import Generator, Numbers

    prompts = make_prompts(case.prompts)

    def generate() -> Any:
        model = make_model(group, case)
        made = Generator(model, Numbers(VOCABULARY), engine=case.engine, max_requests=case.prompts, max_tokens=64)
        return made.generate(prompts, case.new_tokens)

    stock = generate()
    assert [len(each) for each in stock.tokens] == [case.new_tokens] * case.prompts
    rows = forward_only.min_rows if case.threshold is None else lambda *_: case.threshold
    config = OverlapConfig(tensor={"method": "auto", "autotune_cache": None, **(case.tensor or {})})
    with patch.object(forward_only, "min_rows", rows), enable(config, strict=True) as session:
        mine = generate()
        report = session.report().as_dict()
    return Tokens(stock.tokens, mine.tokens, mine.engine, report["modules"], report["not_overlapped"])
