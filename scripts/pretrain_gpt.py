"""Pretrains a GPT on Megatron's training loop; takes Megatron's arguments.

Run it through the plugin: ``python -m megatron_overlap scripts/pretrain_gpt.py ARGS --overlap-config FILE``, or
directly, without the plugin.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # `runpy.run_path` does not add it
from pretrain_decoder import pretrain_decoder

if __name__ == "__main__":
    pretrain_decoder()
