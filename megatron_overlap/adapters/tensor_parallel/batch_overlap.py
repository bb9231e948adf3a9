"""Batch overlap: a transformer layer of Megatron runs on two parts of its micro-batch, or of each sequence.

One part computes while the messages of the other part travel. `split_layer.py` runs a layer.

The first layer also hides the reduce-scatter of the embedding: under sequence parallelism an embedding with a sharded
vocabulary ends with one. Here it ends before, and the first layer sums each part while it computes the other one. In
backward it starts the all-gather of each part's gradient, which the embedding waits for.
"""

import functools
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import make_viewless_tensor

from megatron_overlap.adapters.tensor_parallel import eligibility
from megatron_overlap.adapters.tensor_parallel.dispatch import EMBEDDING, LinearAdapter
from megatron_overlap.adapters.tensor_parallel.division import BatchDivision, Division, sequence_division
from megatron_overlap.adapters.tensor_parallel.layer_handoff import InputPart, PendingEmbedding, PendingOutput
from megatron_overlap.adapters.tensor_parallel.split_layer import SplitLayer
from megatron_overlap.adapters.wrapping import Method, is_hooked, replaced, tracing, untraced
from megatron_overlap.autotune.candidates import BATCH_OVERLAP, SEPARATE_LAYERS, SEQUENCE_OVERLAP, Candidate
from megatron_overlap.session import Session

type _Split = Literal["none", "batch", "sequence"]
_SPLITS: dict[Candidate, _Split] = {BATCH_OVERLAP: "batch", SEQUENCE_OVERLAP: "sequence"}
_POSITIONAL = ("hidden_states", "attention_mask")


def block_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerBlock.forward`: the original, with the order of its layers recorded.

    With `method: auto` the autotuner selects whether the layers run in batch overlap: on parts of the batch, or of each
    sequence if the batch does not split.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff, skips_outputs = adapter.layer_handoff, session.config.tensor.recompute_output == "skip"

    @untraced
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Further positional arguments are not known, and may let the block read the outputs of its layers.
        unknown = len(args) > len(_POSITIONAL)
        reads_outputs = unknown or self.config.cpu_offloading or kwargs.get("extract_layer_indices")
        with layer_handoff.block(() if reads_outputs else _chains(self)):
            return original(self, *args, **kwargs)

    if adapter.split != "none":
        return recorded

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        # An exception in a backward pass leaves that pass's values here, and not every loop calls `next_step`.
        adapter.split, adapter.autotuner.paused = "none", False

        def run(candidate: Candidate) -> Any:
            used, given = _SPLITS.get(candidate, "none"), kwargs
            if used == "none" and (pending := layer_handoff.take(kwargs.get("hidden_states"))) is not None:
                given = {**kwargs, "hidden_states": _whole(pending)}
                del pending  # It holds a tensor of all rows, and this frame lives while the layers run.
            with replaced(vars(adapter), split=used):
                output = recorded(self, *args, **given)
            if self.config.recompute_granularity == "full":
                _recompute_with(adapter, used, output)
            return output

        arguments = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        if not self.pre_process:
            arguments["hidden_states"] = self.input_tensor
        x = arguments["hidden_states"]
        unknown = len(args) > len(_POSITIONAL) or not isinstance(x, torch.Tensor)
        reasons: list[str] = []
        for overlap, each in _SPLITS.items():
            found = (_unsupported_reason(layer, arguments, adapter, each) for layer in self.layers)
            reason = "positional arguments" if unknown else next(filter(None, found), None)
            if reason is None:
                embedding = layer_handoff.stored(x)
                leaf = embedding.terms if isinstance(embedding, PendingEmbedding) else x
                reason = eligibility.unsupported_gradient_reason(self, leaf)
            if reason is None:
                return adapter.autotuner.run_block(self.layers, x, run, overlap, leaf)
            reasons.append(reason)
        session.counters.exclude("batch overlap", reasons[0])
        return run(SEPARATE_LAYERS)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        communicates = self.config.tensor_model_parallel_size > 1 and self.layers
        runs_measured = communicates and adapter.autotuner.enabled and not tracing()
        if runs_measured and kwargs.get("inference_context") is not None:
            session.counters.exclude("batch overlap", eligibility.GENERATION)
            runs_measured = False
        if runs_measured and adapter.autotuner.compares_blocks:
            return measured(self, *args, **kwargs)
        recomputes = skips_outputs and communicates and self.config.recompute_granularity == "full"
        return (recorded if recomputes and not tracing() else original)(self, *args, **kwargs)

    return forward


def layer_forward(original: Method, session: Session) -> Method:
    """Replacement of `TransformerLayer.forward`; equal, because each row of a micro-batch is computed independently.

    With full recomputation the MLP of the last layer of a recomputed part ends before its last linear layer, whose
    output no code reads: it is NaN.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff, skips_outputs = adapter.layer_handoff, session.config.tensor.recompute_output == "skip"

    @untraced
    def split(self: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(_POSITIONAL, args, strict=False)), **kwargs}
        if arguments.get("inference_context") is not None:
            session.counters.exclude("batch overlap", eligibility.GENERATION)
            return original(self, *args, **kwargs)
        x = arguments["hidden_states"]
        pending = layer_handoff.take(x)
        if pending is None and (self.config.tensor_model_parallel_size == 1 or adapter.check.due):
            return original(self, *args, **kwargs)
        # Also for a pending output: the layer before it cannot see in which precision this one runs.
        unknown = len(args) > len(_POSITIONAL)
        reason = "positional arguments" if unknown else _unsupported_reason(self, arguments, adapter, adapter.split)
        reason = reason or eligibility.unsupported_gradient_reason(self, x)
        if reason is not None:
            session.counters.fallback("layer", "transformer layer", "batch_overlap", "forward", reason)
            if pending is not None:
                x = _whole(pending)
                args, kwargs = ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})
            return original(self, *args, **kwargs)
        split_layer = SplitLayer(self, adapter)
        if not isinstance(pending, PendingOutput):
            division: Division = BatchDivision()
            if adapter.split == "sequence":
                division = sequence_division(self, x, session.config.tensor.split_at)
            if pending is None:
                pending = PendingOutput(x, [InputPart(part) for part in division.parts(x)], division)
            else:
                pending = PendingOutput(x, split_layer.embedded(division.rows(pending.terms)), division)
        follower = layer_handoff.next_layer(self)
        if follower is not None and _unsupported_reason(follower, arguments, adapter, adapter.split) is not None:
            follower = None
        output = split_layer.forward(pending, arguments, follower)
        return (_whole(output) if follower is None else layer_handoff.put(output)), None

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = original if adapter.split == "none" else split
        if skips_outputs and layer_handoff.is_unread(self) and eligibility.reads_only_sum(self):
            with adapter.unread(self.mlp.linear_fc2):
                return run(self, *args, **kwargs)
        return run(self, *args, **kwargs)

    return forward


def _chains(block: Any) -> list[list[Any]]:
    """Layers of a block, divided where other code reads the output of a layer: Megatron's `checkpoint` saves it."""
    config, layers = block.config, list(block.layers)
    if config.recompute_granularity != "full" or not block.training:
        return [layers]
    number = config.recompute_num_layers
    if config.recompute_method == "uniform":
        return [layers[start : start + number] for start in range(0, len(layers), number)]
    return [*([layer] for layer in layers[:number]), layers[number:]]


def _recompute_with(adapter: LinearAdapter, split: _Split, output: Any) -> None:
    """Lets recomputation in backward run the layers of a block as forward did, and with the same split."""
    autotuner = adapter.autotuner
    paused = autotuner.paused

    def begin(_: Any) -> None:
        adapter.split, autotuner.paused = split, paused
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end() -> None:
        adapter.split, autotuner.paused = "none", False

    node = (output[0] if isinstance(output, tuple) else output).grad_fn
    if node is not None:
        node.register_prehook(begin)


def _whole(pending: PendingOutput | PendingEmbedding) -> torch.Tensor:
    """The complete output of a layer or of the embedding, for the whole micro-batch."""
    whole = pending.whole()
    viewless: torch.Tensor = make_viewless_tensor(inp=whole, requires_grad=whole.requires_grad, keep_graph=True)
    return viewless


def _unsupported_reason(layer: Any, arguments: dict[str, Any], adapter: LinearAdapter, split: str) -> str | None:
    """The reason that a layer runs on the whole micro-batch; None if it supports `split`."""
    if eligibility.is_capturing(arguments["hidden_states"]):
        return eligibility.CAPTURED
    if adapter.fused:
        return "method fused does not split the batch"
    reason = eligibility.unsupported_layer_reason(layer, arguments, split)
    if reason is not None or not layer.config.sequence_parallel:
        return reason
    if adapter.splits_queries:
        return "attention query_split hides the reduce-scatter of the output projection"
    x = arguments["hidden_states"]
    for op, linear in zip(("ag_gemm", "gemm_rs") * 2, eligibility.linears_of(layer), strict=True):
        if reason := adapter.unsupported_reason(x, linear.weight, linear.tp_group, op):
            return reason
    return None


_MODEL_POSITIONAL = ("input_ids", "position_ids", "attention_mask")
_READERS = ("decoder_input", "output_processor", "extra_block_kwargs")
"""Arguments of the model that replace the output of the embedding, or let other code read it."""


def model_forward(original: Method, session: Session) -> Method:
    """Replacement of `GPTModel.forward`, which equals the original.

    Where only the first layer of its block reads the output of the embedding, that layer completes the output if it
    runs in batch overlap; otherwise the block does.
    """
    adapter = session.adapter(LinearAdapter)
    layer_handoff = adapter.layer_handoff

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = self.config
        # Layers do not run in two parts, or this stage has no embedding whose output is rows of each rank.
        if (
            tracing()
            or (adapter.split == "none" and not adapter.autotuner.compares_blocks)
            or adapter.check.due
            or not (self.pre_process and config.sequence_parallel and config.tensor_model_parallel_size > 1)
        ):
            return original(self, *args, **kwargs)
        reason = _unsupported_model_reason(self, args, kwargs)
        if reason is not None:
            session.counters.exclude(EMBEDDING, f"the first layer cannot overlap its reduce-scatter: {reason}")
            return original(self, *args, **kwargs)
        embedding = self.embedding
        words = embedding.word_embeddings

        def pending(input_ids: torch.Tensor, position_ids: torch.Tensor, tokentype_ids: None = None) -> torch.Tensor:
            """`LanguageModelEmbedding.forward`, up to the sum over ranks."""
            return layer_handoff.put(PendingEmbedding(words(input_ids), words.tp_group))

        own_terms = functools.partial(_own_terms, words)
        with replaced(vars(words), forward=own_terms), replaced(vars(embedding), forward=pending):
            try:
                return original(self, *args, **kwargs)
            finally:
                layer_handoff.drop()

    return forward


def _own_terms(words: Any, tokens: torch.Tensor) -> torch.Tensor:
    """`VocabParallelEmbedding.forward` `[S, B, H]` up to the sum over ranks: zero for tokens of other ranks."""
    others = (tokens < words.vocab_start_index) | (tokens >= words.vocab_end_index)
    own = (tokens - words.vocab_start_index).masked_fill(others, 0)
    rows = words.weight[own] if words.deterministic_mode else torch.nn.functional.embedding(own, words.weight)
    return rows.masked_fill(others.unsqueeze(-1), 0.0).transpose(0, 1).contiguous()


def _unsupported_model_reason(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The reason that the embedding of a model completes its own output; None if its first layer may do it."""
    if type(model) is not GPTModel or type(model.decoder) is not TransformerBlock or not model.decoder.layers:
        return "the model is not a GPTModel of Megatron"
    config, block, embedding = model.config, model.decoder, model.embedding
    first, words = block.layers[0], embedding.word_embeddings
    if len(args) > len(_MODEL_POSITIONAL):
        return "positional arguments"
    if kwargs.get("inference_context") is not None or kwargs.get("inference_params") is not None:
        return eligibility.GENERATION
    given = [name for name in _READERS if kwargs.get(name) is not None]
    if given:
        return f"the model is called with {', '.join(given)}"
    if type(first).forward is not TransformerLayer.forward:
        return f"the first layer is a {type(first).__name__}"
    if getattr(config, "mtp_num_layers", None) or getattr(config, "config_logger_dir", ""):
        return "another module reads the output of the embedding"
    if config.recompute_granularity == "full" and model.training:
        return "full activation recomputation saves the input of the first layer"
    captures = getattr(config, "cuda_graph_impl", "none") != "none"
    if config.fp8 or getattr(config, "fp4", None) or config.cpu_offloading or captures:
        return "the block converts, offloads or captures its input"
    if eligibility.is_capturing(words.weight):
        return eligibility.CAPTURED
    if not (embedding.reduce_scatter_embeddings and words.reduce_scatter_embeddings):
        return "position embeddings are added before the reduce-scatter"
    if embedding.config.fp32_residual_connection or getattr(embedding.config, "use_mup", False):
        return "the embedding converts or scales its output"
    if model.training and embedding.embedding_dropout.p > 0.0:
        return "dropout"
    if getattr(words, "gtp_remat_size", 1) > 1:
        return "generalized tensor parallel weights"
    if getattr(words, "use_inference_optimized_reduce_scatter", False) and not model.training:
        return "--transformer-impl inference_optimized"
    for module in (embedding, words):
        if is_hooked(module) or "forward" in vars(module):
            return "a hook reads the output of the embedding"
    for module in (block, first):
        # Megatron passes the input by keyword.
        if module._forward_pre_hooks_with_kwargs or module._backward_hooks or "forward" in vars(module):
            return "a hook reads the input of the first layer"
    return None
