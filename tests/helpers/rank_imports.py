"""The imports of every `ForkedProgram`: torch and the packages that Megatron imports, which take most of its start.

Megatron and TransformerEngine are not among them. A program imports them itself, after the patches that it wants.
"""

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.utils.cpp_extension
import torch.utils.tensorboard  # noqa: F401
import wandb  # noqa: F401

import megatron_overlap.adapters.training.bootstrap
import megatron_overlap.ops  # noqa: F401
