"""Batch overlap of the embedding: the first transformer layer hides its reduce-scatter.

Under sequence parallelism an embedding with a sharded vocabulary ends with a reduce-scatter. Here it ends before, and
the first layer sums each part while it computes the other one. In backward it starts the all-gather of each part's
gradient, which the embedding waits for.
"""

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_overlap.adapters.tensor_parallel.dispatch import EMBEDDING, LinearAdapter
from megatron_overlap.adapters.tensor_parallel.eligibility import CAPTURED, GENERATION, is_capturing
from megatron_overlap.adapters.tensor_parallel.layer_handoff import LayerHandoff, PendingEmbedding
from megatron_overlap.adapters.wrapping import Method, replaced_forward, tracing
from megatron_overlap.session import Session

_POSITIONAL = ("input_ids", "position_ids", "attention_mask")
_READERS = ("decoder_input", "output_processor", "extra_block_kwargs")
"""Arguments of the model that replace the output of the embedding, or let other code read it."""


def model_forward(original: Method, session: Session) -> Method:
    """Replacement of `GPTModel.forward`.

    Runs the original. Where only the first layer of its block reads the output of the embedding, that layer completes
    the output if it runs in batch overlap; else the block does.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff = adapter.layer_handoff

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if tracing() or not _may_split(adapter) or not _sums_by_reduce_scatter(self):
            return original(self, *args, **kwargs)
        reason = _unsupported_reason(self, args, kwargs)
        if reason is not None:
            session.counters.exclude(EMBEDDING, f"the first layer cannot overlap its reduce-scatter: {reason}")
            return original(self, *args, **kwargs)
        embedding = self.embedding
        words = embedding.word_embeddings
        with ExitStack() as replaced:
            replaced.enter_context(replaced_forward(words, functools.partial(_own_terms, words)))
            replaced.enter_context(replaced_forward(embedding, _pending(words, layer_handoff)))
            replaced.callback(layer_handoff.drop)
            return original(self, *args, **kwargs)

    return forward


def _may_split(adapter: LinearAdapter) -> bool:
    return (adapter.split != "none" or adapter.autotuner.enabled) and not adapter.check.due


def _sums_by_reduce_scatter(model: Any) -> bool:
    """Whether this pipeline stage has the embedding, and its output is rows of each rank."""
    config = model.config
    return bool(model.pre_process and config.sequence_parallel and config.tensor_model_parallel_size > 1)


def _pending(words: Any, layer_handoff: LayerHandoff) -> Callable[..., torch.Tensor]:
    """`LanguageModelEmbedding.forward`, up to the sum over ranks."""

    def forward(input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: None = None) -> torch.Tensor:
        return layer_handoff.put(PendingEmbedding(words(input_ids), words.tp_group))

    return forward


def _own_terms(words: Any, tokens: torch.Tensor) -> torch.Tensor:
    """`VocabParallelEmbedding.forward` `[S, B, H]` up to the sum over ranks: zero for tokens of other ranks."""
    others = (tokens < words.vocab_start_index) | (tokens >= words.vocab_end_index)
    own = (tokens - words.vocab_start_index).masked_fill(others, 0)
    rows = words.weight[own] if words.deterministic_mode else torch.nn.functional.embedding(own, words.weight)
    return rows.masked_fill(others.unsqueeze(-1), 0.0).transpose(0, 1).contiguous()


def _unsupported_reason(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason that the embedding of a model completes its own output; None if its first layer may do it."""
    if type(model) is not GPTModel or type(model.decoder) is not TransformerBlock or not model.decoder.layers:
        return "the model is not a GPTModel of Megatron"
    config, block = model.config, model.decoder
    if len(args) > len(_POSITIONAL):
        return "positional arguments"
    if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
        return GENERATION
    given = [name for name in _READERS if kwargs.get(name) is not None]
    if given:
        return f"the model is called with {', '.join(given)}"
    first, embedding = block.layers[0], model.embedding
    if type(first).forward is not TransformerLayer.forward:
        return f"the first layer is a {type(first).__name__}"
    if getattr(config, "mtp_num_layers", None) or getattr(config, "config_logger_dir", ""):
        return "another module reads the output of the embedding"
    if config.recompute_granularity == "full" and model.training:
        return "full activation recomputation saves the input of the first layer"
    if (
        config.fp8
        or getattr(config, "fp4", None)
        or config.cpu_offloading
        or getattr(config, "cuda_graph_impl", "none") != "none"
    ):
        return "the block converts, offloads or captures its input"
    if is_capturing(embedding.word_embeddings.weight):
        return CAPTURED
    return _embedding_reason(embedding, training=model.training) or _hook_reason(embedding, block, first)


def _embedding_reason(embedding: Any, *, training: bool) -> str | None:
    """The reason in an embedding."""
    config, words = embedding.config, embedding.word_embeddings
    if not (embedding.reduce_scatter_embeddings and words.reduce_scatter_embeddings):
        return "position embeddings are added before the reduce-scatter"
    if config.fp32_residual_connection or getattr(config, "use_mup", False):
        return "the embedding converts or scales its output"
    if training and embedding.embedding_dropout.p > 0.0:
        return "dropout"
    if getattr(words, "gtp_remat_size", 1) > 1:
        return "generalized tensor parallel weights"
    if getattr(words, "use_inference_optimized_reduce_scatter", False) and not training:
        return "--transformer-impl inference_optimized"
    return None


def _hook_reason(embedding: Any, block: Any, first: Any) -> str | None:
    """The reason in a hook or a replaced method that may read the output of the embedding."""
    words = embedding.word_embeddings
    for module in (embedding, words):
        if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or "forward" in vars(module):
            return "a hook reads the output of the embedding"
    for module in (block, first):
        # Megatron passes the input by keyword.
        if module._forward_pre_hooks_with_kwargs or module._backward_hooks or "forward" in vars(module):
            return "a hook reads the input of the first layer"
    return None
