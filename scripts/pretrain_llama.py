"""Pretrains a LLaMA on Megatron's training loop; takes Megatron's arguments.

The flags below are what makes the architecture; sizes, and ``--group-query-attention --num-query-groups N`` where
the model has grouped queries, come from the command line, which also wins where it sets one of these.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `runpy.run_path` does not add it
from pretrain_decoder import pretrain_decoder

LLAMA = (
    "--normalization", "RMSNorm",
    "--swiglu",
    "--position-embedding-type", "rope",
    "--disable-bias-linear",
    "--untie-embeddings-and-output-weights",
)  # fmt: skip

if __name__ == "__main__":
    pretrain_decoder(LLAMA)
