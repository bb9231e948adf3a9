"""Model FLOPs of a training step, from the config alone. Pure.

Convention: what the model's matrix multiplications need, 2 operations per multiply-add, three times (forward, and in
the backward the gradients of input and weight). Attention scores count half of the square, as the mask leaves it.
Recomputation, the optimizer, norms, activations and the embedding look-up count nothing; the logits are of the padded
vocabulary. That is the convention of Megatron's own throughput line. Published figures that count the whole attention
square are higher for the same step: `attention="full"` gives theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_overlap.config import LaunchConfig, ModelConfig

Attention = Literal["causal", "full"]

CONVENTION = "model FLOPs, forward + backward, causal half of attention, no recomputation (as Megatron logs them)"
VOCABULARY_MULTIPLE = 128  # Megatron's default of --make-vocab-size-divisible-by

_FORWARD_AND_BACKWARD = 3
_MULTIPLY_ADD = 2
_MULTIPLE_FLAG = "--make-vocab-size-divisible-by"
# Arguments that make the model another one than the `model` section says.
_OTHER_MODELS = (
    "--num-experts",
    "--multi-latent-attention",
    "--mtp-num-layers",
    "--hybrid-",
    "--is-hybrid-model",
    "--experimental-attention-variant",
    "--linear-attention-freq",
    "--attention-output-gate",
    "--spec",
    "--heterogeneous-",
    "--use-checkpoint-args",
)


class UnknownFlopsError(ValueError):
    """The FLOPs of this model are not known; the text names the argument."""


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of one token, forward and backward, by where they are spent."""

    projections: float
    """QKV and the attention output."""
    attention: float
    """Scores, and their product with the values."""
    mlp: float
    logits: float

    @property
    def total(self) -> float:
        return self.projections + self.attention + self.mlp + self.logits


def token_flops(
    model: ModelConfig, seq_length: int, padded_vocab_size: int, attention: Attention = "causal"
) -> TokenFlops:
    """FLOPs of one token of a full sequence, forward and backward.

    Args:
        model: the shape.
        seq_length: tokens in a sequence.
        padded_vocab_size: rows of the output layer; see `padded_vocab_size`.
        attention: `causal` counts half of the score matrix, `full` all of it.
    """
    gemm = _FORWARD_AND_BACKWARD * _MULTIPLY_ADD
    hidden, layers = model.hidden_size, model.num_layers
    queries = model.head_size * model.num_attention_heads
    keys_and_values = 2 * model.head_size * model.num_query_groups
    mlp_gemms = 3 if model.swiglu else 2  # SwiGLU: gate, up and down
    keys_seen = seq_length / 2 if attention == "causal" else seq_length
    return TokenFlops(
        projections=float(gemm * layers * hidden * (queries + keys_and_values + queries)),
        attention=gemm * layers * 2 * queries * keys_seen,
        mlp=float(gemm * layers * mlp_gemms * hidden * model.ffn_hidden_size),
        logits=float(gemm * hidden * padded_vocab_size),
    )


def padded_vocab_size(vocab_size: int, tensor: int, multiple: int = VOCABULARY_MULTIPLE) -> int:
    """Rows Megatron gives the embedding: each tensor parallel rank holds a multiple of `multiple`."""
    step = multiple * tensor
    return -(-vocab_size // step) * step


def tokens_per_step(cfg: LaunchConfig) -> int:
    """Tokens that all ranks together train on in one iteration."""
    return cfg.train.global_batch_size * cfg.train.seq_length


def step_flops(cfg: LaunchConfig, attention: Attention = "causal") -> float:
    """Model FLOPs of one iteration, over all ranks.

    Raises:
        UnknownFlopsError: `megatron_args` make the model another one than its section says.
    """
    known_model(cfg.megatron_args)
    vocabulary = padded_vocab_size(cfg.model.vocab_size, cfg.parallel.tensor, _multiple(cfg.megatron_args))
    return token_flops(cfg.model, cfg.train.seq_length, vocabulary, attention).total * tokens_per_step(cfg)


def known_model(megatron_args: Sequence[str]) -> None:
    """Check that the further arguments leave the model as its section says.

    Raises:
        UnknownFlopsError: one of them does not.
    """
    for arg in megatron_args:
        if arg.startswith(_OTHER_MODELS):
            raise UnknownFlopsError(f"megatron_args: {arg}: the FLOPs of that model are not known here")


def _multiple(megatron_args: Sequence[str]) -> int:
    for index, arg in enumerate(megatron_args):
        flag, equals, value = arg.partition("=")
        if flag == _MULTIPLE_FLAG:
            return int(value if equals else megatron_args[index + 1])
    return VOCABULARY_MULTIPLE
