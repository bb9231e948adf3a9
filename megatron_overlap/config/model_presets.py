"""Presets: named model shapes and the defaults of each architecture, as plain data.

A `model` section merges the defaults of the architecture, the preset and the keys of the section.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

Fields = Mapping[str, object]

ARCHITECTURES: Mapping[str, Fields] = MappingProxyType(
    {
        "gpt": {
            "normalization": "LayerNorm",
            "swiglu": False,
            "rotary": False,
            "add_bias": True,
            "untie_embeddings": False,
        },
        "llama": {
            "normalization": "RMSNorm",
            "swiglu": True,
            "rotary": True,
            "add_bias": False,
            "untie_embeddings": True,
        },
    }
)


def _shape(arch: str, layers: int, hidden: int, heads: int, vocab: int, positions: int, **more: object) -> Fields:
    return MappingProxyType(
        {
            "arch": arch,
            "num_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "vocab_size": vocab,
            "max_position_embeddings": positions,
            **more,
        }
    )


def _gpt3(layers: int, hidden: int, heads: int) -> Fields:
    """A row of table 2.1 of the GPT-3 paper with the vocabulary of its tokenizer."""
    return _shape("gpt", layers, hidden, heads, vocab=50257, positions=2048)


def _llama2(layers: int, hidden: int, heads: int, ffn: int, groups: int | None = None) -> Fields:
    return _shape(
        "llama",
        layers,
        hidden,
        heads,
        vocab=32000,
        positions=4096,
        ffn_hidden_size=ffn,
        num_query_groups=groups or heads,
    )


def _llama3(layers: int, hidden: int, heads: int, ffn: int) -> Fields:
    return _shape(
        "llama",
        layers,
        hidden,
        heads,
        vocab=128256,
        positions=8192,
        ffn_hidden_size=ffn,
        num_query_groups=8,
        rotary_base=500000,
    )


# The tiny vocabularies are not multiples of 128, so that every Megatron release pads them to the same size:
# the NullTokenizer up to 0.17 adds one id.
PRESETS: Mapping[str, Fields] = MappingProxyType(
    {
        "gpt_tiny": _shape("gpt", 2, 256, 8, vocab=4000, positions=1024),
        "llama_tiny": _shape("llama", 2, 256, 8, vocab=4000, positions=1024, ffn_hidden_size=688, num_query_groups=4),
        "gpt3_125m": _gpt3(12, 768, 12),
        "gpt3_350m": _gpt3(24, 1024, 16),
        "gpt3_760m": _gpt3(24, 1536, 16),
        "gpt3_1.3b": _gpt3(24, 2048, 16),
        "gpt3_2.7b": _gpt3(32, 2560, 32),
        "gpt3_6.7b": _gpt3(32, 4096, 32),
        "gpt3_13b": _gpt3(40, 5120, 40),
        "gpt3_175b": _gpt3(96, 12288, 96),
        "llama2_7b": _llama2(32, 4096, 32, ffn=11008),
        "llama2_13b": _llama2(40, 5120, 40, ffn=13824),
        "llama2_70b": _llama2(80, 8192, 64, ffn=28672, groups=8),
        "llama3_8b": _llama3(32, 4096, 32, ffn=14336),
        "llama3_70b": _llama3(80, 8192, 64, ffn=28672),
        # Shapes of the Llama 3 paper (arXiv 2407.21783), table 3.
        "llama3_405b": _llama3(126, 16384, 128, ffn=53248),
        # Mixtral of Experts (arXiv 2401.04088), table 1: one expert. `megatron_args` sets the number of experts.
        "mixtral_8x7b": _shape(
            "llama",
            32,
            4096,
            32,
            vocab=32000,
            positions=32768,
            ffn_hidden_size=14336,
            num_query_groups=8,
            rotary_base=1000000,
        ),
    }
)
