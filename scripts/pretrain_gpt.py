"""Pretrains a GPT on Megatron's training loop; takes Megatron's arguments.

Run it through the plugin: ``python -m megatron_overlap scripts/pretrain_gpt.py ARGS --overlap-config FILE``, or
directly, without the plugin.
"""

from megatron_overlap.adapters.training.pretrain import pretrain_decoder

if __name__ == "__main__":
    pretrain_decoder()
