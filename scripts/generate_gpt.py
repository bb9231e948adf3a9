"""Generates greedily with a GPT on one of Megatron's inference engines; takes Megatron's arguments.

Run it through the plugin: ``python -m megatron_overlap scripts/generate_gpt.py ARGS --overlap-config FILE``, or
directly, without the plugin. `--load` takes a checkpoint; without it the weights are random. Every line of the file
`--generate-prompts` is a prompt. `--generate-workloads` times random prompts instead, for `megatron-overlap compare
--generate`.
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

import torch
import torch.distributed as dist
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.engines.static_engine import StaticInferenceEngine
from megatron.core.inference.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron.core.utils import get_model_config

from megatron_overlap.tools.compare.generation import RESULT_FILE, Workload

_MIN_CACHE_GB = 0.1
_CACHE_BLOCK = 256
"""Tokens of a block of the dynamic engine's cache."""


class TimedWrapper(GPTInferenceWrapper):
    """Megatron's wrapper of a GPT, which times every forward pass.

    Attributes:
        device: of the model.
        steps: number of tokens and milliseconds of each forward pass.
    """

    device: torch.device
    steps: list[tuple[int, float]]

    def run_one_forward_step(self, inference_input: Any, *args: Any, **kwargs: Any) -> Any:
        """See Megatron."""
        start = self._now()
        logits = super().run_one_forward_step(inference_input, *args, **kwargs)
        self.steps.append((inference_input["tokens"].numel(), 1e3 * (self._now() - start)))
        return logits

    def slowest_steps(self) -> list[tuple[int, float]]:
        """`steps` with the time of the slowest rank of the job; collective."""
        times = torch.tensor([ms for _, ms in self.steps], device=self.device)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return [(tokens, ms) for (tokens, _), ms in zip(self.steps, times.tolist(), strict=True)]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


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
        steps: tokens and milliseconds of every forward pass on the slowest rank.
        log_probs: of the generated tokens, where they were asked for.
    """

    engine: str
    tokens: list[list[int]]
    steps: list[tuple[int, float]] = field(default_factory=list)
    log_probs: list[list[float]] = field(default_factory=list)

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
        cache_gb = max(_MIN_CACHE_GB, _cache_gb(get_model_config(model), max_requests, max_tokens))
        self._wrapper = TimedWrapper(model, StaticInferenceContext(max_requests, max_tokens))
        self._wrapper.device, self._wrapper.steps = next(model.parameters()).device, []
        controller = TextGenerationController(inference_wrapped_model=self._wrapper, tokenizer=tokenizer)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            legacy = engine == "static"
            self._engine = StaticInferenceEngine(
                controller, max_batch_size=max_requests, random_seed=1, legacy=legacy, buffer_size_gb=cache_gb
            )

    def generate(self, prompts: Sequence[str], num_tokens: int, *, log_probs: bool = False) -> Generated:
        """Generates `num_tokens` tokens greedily from each prompt; all ranks call it."""
        sampling = SamplingParams(
            num_tokens_to_generate=num_tokens,
            top_k=1,
            termination_id=-1,
            return_log_probs=log_probs,
            skip_prompt_log_probs=log_probs,
        )
        sampling.add_attributes({"no_early_termination": True})  # else the static engine ends at token `eod`
        self._wrapper.steps.clear()
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            results = self._engine.generate(prompts=list(prompts), sampling_params=sampling)
        tokens = [[int(token) for token in result.generated_tokens] for result in results]
        found = [[float(each) for each in result.generated_log_probs] for result in results] if log_probs else []
        engine = "static" if self._engine.legacy else "dynamic"
        return Generated(engine, tokens, self._wrapper.slowest_steps(), found)


def _cache_gb(config: Any, max_requests: int, max_tokens: int) -> float:
    """GiB of keys and values, and a quarter more for blocks that the engine keeps for itself."""
    heads = (config.num_query_groups or config.num_attention_heads) // config.tensor_model_parallel_size
    layers = config.num_layers // config.pipeline_model_parallel_size
    token_bytes = 2 * layers * max(1, heads) * config.kv_channels * config.params_dtype.itemsize
    return 1.25 * max_requests * -(-max_tokens // _CACHE_BLOCK) * _CACHE_BLOCK * token_bytes / 2**30


def random_prompts(count: int, num_tokens: int, vocab_size: int) -> list[str]:
    """`count` prompts of `num_tokens` numbers for `Numbers`; the same in every call."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(2, vocab_size, (count, num_tokens), generator=generator).tolist()
    return [" ".join(map(str, row)) for row in rows]


def time_workloads(
    model: Any, workloads: Sequence[Workload], vocab_size: int, *, engine: str, num_tokens: int
) -> list[dict[str, Any]]:
    """Tokens and times of every workload. A call that generates two tokens comes before the timed one."""
    generator = Generator(
        model,
        Numbers(vocab_size),
        engine=engine,
        max_requests=max(each.batch for each in workloads),
        max_tokens=max(each.prompt_tokens for each in workloads) + num_tokens,
    )
    rows = []
    for each in workloads:
        prompts = random_prompts(each.batch, each.prompt_tokens, vocab_size)
        generator.generate(prompts, 2)
        generated = generator.generate(prompts, num_tokens)
        rows.append({**asdict(each), "engine": generated.engine, "tokens": generated.tokens, **generated.summary()})
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the arguments of this script to Megatron's parser."""
    group = parser.add_argument_group("generation")
    work = group.add_mutually_exclusive_group(required=True)
    work.add_argument("--generate-prompts", type=Path, help="a file with a prompt in each line")
    work.add_argument("--generate-workloads", nargs="+", type=Workload.parse, metavar="TOKENSxBATCH")
    group.add_argument("--generate-tokens", type=int, default=32, help="tokens generated from each prompt")
    group.add_argument("--generate-engine", choices=["static", "dynamic"], default="dynamic")
    group.add_argument("--generate-rounds", type=int, default=1, help="calls with all prompts; the last is reported")
    group.add_argument("--generate-json", type=Path, help="file for the tokens and times of rank 0")
    return parser


def main() -> None:
    """Reads Megatron's arguments, builds the model, and generates; rank 0 prints and writes the result."""
    from megatron.training import arguments, get_args, get_model
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
    (model,) = get_model(build_model, wrap_with_ddp=False)
    if args.load is not None:
        load_checkpoint([model], None, None)
    model.eval()
    result = _generate_from_file(model, args) if args.generate_prompts is not None else _generate_workloads(model, args)
    if dist.get_rank() == 0:
        for file in filter(None, (args.generate_json, _file_of_run(args))):
            file.write_text(json.dumps(result))
    dist.barrier()


def _file_of_run(args: argparse.Namespace) -> Path | None:
    """The file that `megatron-overlap compare --generate` reads, in the run directory of the plugin."""
    folder = getattr(args, "overlap_run_dir", None)  # only under `python -m megatron_overlap`
    return None if folder is None or args.generate_workloads is None else Path(folder) / RESULT_FILE


def _generate_from_file(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    from megatron.training import get_tokenizer

    tokenizer = Numbers(args.vocab_size) if args.tokenizer_type == "NullTokenizer" else get_tokenizer()
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
    if dist.get_rank() == 0:
        for tokens in generated.tokens:
            print(f"generated: {tokenizer.detokenize(tokens)}")
        times = {name: round(value, 2) for name, value in generated.summary().items()}
        print(f"engine {generated.engine}, {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens: {times}")
    return {**asdict(generated), **generated.summary()}


def _generate_workloads(model: Any, args: argparse.Namespace) -> dict[str, Any]:
    from megatron_overlap.adapters.training.train_step import describe_run

    rows = time_workloads(
        model,
        args.generate_workloads,
        args.vocab_size,
        engine=args.generate_engine,
        num_tokens=args.generate_tokens,
    )
    return {"workloads": rows, "meta": describe_run(next(model.parameters()).device.type)}


if __name__ == "__main__":
    main()
