"""Worker functions of test_generation.py: Megatron's inference engines with and without the plugin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
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
        dtype: of weights and activations.
    """

    engine: str
    sp: bool = False
    tensor: Any = None
    te: bool = False
    llama: bool = False
    prompts: int = 3
    new_tokens: int = 6
    threshold: float | None = None
    dtype: torch.dtype = torch.float32


class Rounding(NamedTuple):
    """Generation with the plugin and with the stock path, against the stock path in fp32 with the same weights.

    Attributes:
        stock_deviation: largest deviation of a log-probability of a token of stock.
        deviation: the same of the plugin, up to the first divergence of each prompt.
        margins: at each first divergence, the log-probability in fp32 of the token of stock minus that of the plugin.
        tokens: number of compared tokens.
        overlapped: calls.
    """

    stock_deviation: float
    deviation: float
    margins: list[float]
    tokens: int
    overlapped: int


class Tokens(NamedTuple):
    """The tokens of the stock path and of the plugin, the engine that ran, and the calls of the report."""

    stock: list[list[int]]
    mine: list[list[int]]
    engine: str
    calls: list[dict[str, Any]]
    not_overlapped: dict[str, str]


def make_model(group: dist.ProcessGroup, case: Case) -> Any:
    """A small GPT or LLaMA, with the same weights on every call."""
    return build_gpt(
        ranks=group.size(),
        sp=case.sp,
        dtype=case.dtype,
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


def documented() -> Any:
    """The function of the example in docs/inference.md."""
    page = (Path(__file__).parents[2] / "docs" / "inference.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    return names["log_probabilities"]


def policy(group: dist.ProcessGroup, case: Case) -> list[dict[str, Any]]:
    """The documented log-probabilities of ragged sequences, compared with those of each sequence alone; the calls."""
    start(group)
    _leave_inference()
    model = make_model(group, case)
    sequences = [[int(word) for word in prompt.split()] for prompt in make_prompts(case.prompts)]
    assert len({len(ids) for ids in sequences}) > 1
    alone = [_log_probabilities(model, ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0] for ids in sequences]
    with enable(OverlapConfig(tensor=case.tensor), strict=True) as session:
        found = documented()(model, sequences, group.size() if case.sp else 1)
        calls: list[dict[str, Any]] = session.report().as_dict()["modules"]
    assert [len(each) for each in found] == [len(ids) - 1 for ids in sequences]
    for mine, one in zip(found, alone, strict=True):
        torch.testing.assert_close(mine, one, rtol=1e-5, atol=1e-5)
    return calls


def _leave_inference() -> None:
    """An earlier generation in this process leaves `InferenceMode` active and Megatron's buffer an inference tensor."""
    from megatron.core import parallel_state
    from megatron.core.inference.utils import InferenceMode

    InferenceMode.unset_active()
    parallel_state.destroy_global_memory_buffer()
    parallel_state._set_global_memory_buffer()


def _log_probabilities(model: Any, ids: list[int]) -> torch.Tensor:
    """`[len(ids), vocabulary]`: those of the next token after each token of one sequence."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    padded = torch.tensor([ids + [1] * (-len(ids) % model.config.tensor_model_parallel_size)])
    with torch.no_grad():
        logits = model(padded, torch.arange(padded.shape[1])[None], None)
        return gather_from_tensor_model_parallel_region(logits)[0, : len(ids)].log_softmax(-1)


def rounding(group: dist.ProcessGroup, case: Case) -> Rounding:
    """Generates in `case.dtype` with the stock path and with the plugin, and compares both with fp32."""
    start(group)
    from scripts.generate_gpt import Generator, Numbers

    model, prompts = make_model(group, case), make_prompts(case.prompts)
    made = Generator(model, Numbers(VOCABULARY), engine=case.engine, max_requests=case.prompts, max_tokens=64)
    stock = made.generate(prompts, case.new_tokens, log_probs=True)
    with enable(OverlapConfig(tensor=case.tensor), strict=True) as session:
        mine = made.generate(prompts, case.new_tokens, log_probs=True)
        overlapped = sum(tally.overlapped for tally in session.report().sites.values())
    assert mine.engine == stock.engine == case.engine
    _leave_inference()
    exact = make_model(group, replace(case, dtype=torch.float32))
    for to, source in zip(exact.parameters(), model.parameters(), strict=True):
        to.data.copy_(source)
    stock_deviation = deviation = 0.0
    margins: list[float] = []
    compared = 0
    for number, prompt in enumerate(prompts):
        ids = [int(word) for word in prompt.split()]
        a, b = stock.tokens[number], mine.tokens[number]
        after = _log_probabilities(exact, ids + a)[len(ids) - 1 :]
        differs = next((place for place in range(len(a)) if a[place] != b[place]), None)
        for place, token in enumerate(a):
            stock_deviation = max(stock_deviation, abs(stock.log_probs[number][place] - float(after[place, token])))
            if differs is None or place <= differs:  # before it both engines have read the same tokens
                found = mine.log_probs[number][place] - float(after[place, b[place]])
                deviation, compared = max(deviation, abs(found)), compared + 1
        if differs is not None:
            margins.append(float(after[differs, a[differs]] - after[differs, b[differs]]))
    return Rounding(stock_deviation, deviation, margins, compared, overlapped)


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
