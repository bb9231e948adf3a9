"""Generates greedily with a GPT on one of Megatron's inference engines; takes Megatron's arguments.

Run it through the plugin: ``python -m megatron_overlap scripts/generate_gpt.py ARGS --overlap-config FILE``, or
directly, without the plugin. `--load` takes a checkpoint; without it the weights are random. Every line of the file
`--generate-prompts` is a prompt.
"""

import argparse
import contextlib
import io
import json
import re
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.utils import get_model_config

_CACHE_GB = 0.1


class TimedWrapper(GPTInferenceWrapper):
    """Megatron's wrapper of a GPT, which times every forward pass.

    Attributes:
        steps: number of tokens and milliseconds of each forward pass.
    """

    steps: list[tuple[int, float]]

    def run_one_forward_step(self, inference_input: Any, *args: Any, **kwargs: Any) -> Any:
        """See Megatron."""
        start = time.perf_counter()
        logits = super().run_one_forward_step(inference_input, *args, **kwargs)
        self.steps.append((inference_input["tokens"].numel(), 1e3 * (time.perf_counter() - start)))
        return logits


class Numbers:
    """A tokenizer whose words are numbers: Megatron's NullTokenizer lacks methods that the engines call.

    Args:
        vocab_size: the words are the numbers below it.
    """

    eod, bos, pad = 0, 1, 0

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def tokenize(self, text: str) -> list[int]:
        """The numbers of a text."""
        return [int(word) for word in text.split()]

    def detokenize(self, ids: Sequence[int], **_: Any) -> str:
        """The text of some numbers."""
        return " ".join(str(int(each)) for each in ids)

    def offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """The position of each word in the text."""
        return [match.start() for match in re.finditer(r"\S+", text)]


@dataclass(frozen=True)
class Generated:
    """What one call of an engine generated.

    Attributes:
        engine: the engine that ran: Megatron falls back from dynamic to static with a warning.
        tokens: of each prompt, without the prompt.
        steps: tokens and milliseconds of every forward pass.
    """

    engine: str
    tokens: list[list[int]]
    steps: list[tuple[int, float]] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Milliseconds to the first tokens, milliseconds per decode pass, and generated tokens per second."""
        (_, first_ms), *decode = self.steps
        total_ms = sum(ms for _, ms in self.steps)
        return {
            "first_token_ms": first_ms,
            "decode_ms": median(ms for _, ms in decode) if decode else float("nan"),
            "tokens_per_s": 1e3 * sum(map(len, self.tokens)) / total_ms,
        }


class Generator:
    """One of Megatron's engines for one model.

    Args:
        model: a GPT in evaluation mode.
        tokenizer: with `tokenize`, `detokenize`, `eod`, `bos` and `vocab_size`.
        engine: `static` or `dynamic`.
        max_requests: upper limit of the prompts of one call.
        max_tokens: upper limit of the tokens of a prompt plus the tokens generated from it.
    """

    def __init__(self, model: Any, tokenizer: Any, *, engine: str, max_requests: int, max_tokens: int) -> None:
        ranks = get_model_config(model).tensor_model_parallel_size
        max_requests = -(-max_requests // ranks) * ranks  # the dynamic engine needs a multiple
        self._wrapper = TimedWrapper(model, StaticInferenceContext(max_requests, max_tokens))
        self._wrapper.steps = []
        controller = TextGenerationController(inference_wrapped_model=self._wrapper, tokenizer=tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            legacy = engine == "static"
            self._engine = StaticInferenceEngine(
                controller, max_batch_size=max_requests, random_seed=1, legacy=legacy, buffer_size_gb=_CACHE_GB
            )

    def generate(self, prompts: Sequence[str], num_tokens: int) -> Generated:
        """Generates `num_tokens` tokens greedily from each prompt."""
        sampling = SamplingParams(num_tokens_to_generate=num_tokens, top_k=1, termination_id=-1)
        self._wrapper.steps.clear()
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            results = self._engine.generate(prompts=list(prompts), sampling_params=sampling)
        tokens = [[int(token) for token in result.generated_tokens] for result in results]
        return Generated("static" if self._engine.legacy else "dynamic", tokens, list(self._wrapper.steps))


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments of this script to Megatron's parser."""
    group = parser.add_argument_group("generation")
    group.add_argument("--generate-prompts", type=Path, required=True, help="a file with a prompt in each line")
    group.add_argument("--generate-tokens", type=int, default=32, help="tokens generated from each prompt")
    group.add_argument("--generate-engine", choices=["static", "dynamic"], default="dynamic")
    group.add_argument("--generate-rounds", type=int, default=1, help="calls with all prompts; the last is reported")
    group.add_argument("--generate-json", type=Path, help="file for the tokens and times of rank 0")
    return parser


def main() -> None:
    """Reads Megatron's arguments, builds the model, and prints what it generates on rank 0."""
    import torch
    from megatron.training import arguments, get_args, get_model, get_tokenizer
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron

    from megatron_overlap.adapters.training import bootstrap

    sys.path.insert(0, str(Path(__file__).parent))  # `runpy.run_path` does not add it
    from pretrain_decoder import build_model

    bootstrap.use_compiled_helpers()
    if hasattr(arguments, "parse_and_validate_args"):
        arguments.parse_and_validate_args(extra_args_provider=add_arguments)
        initialize_megatron()
    else:
        initialize_megatron(extra_args_provider=add_arguments)
    args = get_args()
    tokenizer = Numbers(args.vocab_size) if args.tokenizer_type == "NullTokenizer" else get_tokenizer()
    (model,) = get_model(build_model, wrap_with_ddp=False)
    if args.load is not None:
        load_checkpoint([model], None, None)
    model.eval()
    prompts = args.generate_prompts.read_text(encoding="utf-8").splitlines()
    lengths = [len(tokenizer.tokenize(prompt)) for prompt in prompts]
    generator = Generator(
        model,
        tokenizer,
        engine=args.generate_engine,
        max_requests=len(prompts),
        max_tokens=max(lengths) + args.generate_tokens,
    )
    for _ in range(args.generate_rounds):
        generated = generator.generate(prompts, args.generate_tokens)
    if torch.distributed.get_rank() == 0:
        for tokens in generated.tokens:
            print(f"generated: {tokenizer.detokenize(tokens)}")
        times = {name: round(value, 2) for name, value in generated.summary().items()}
        print(f"engine {generated.engine}, {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens: {times}")
        if args.generate_json is not None:
            args.generate_json.write_text(json.dumps({**asdict(generated), **generated.summary()}))
    torch.distributed.barrier()


if __name__ == "__main__":
    main()
