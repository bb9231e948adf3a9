"""The imports of every `ForkedProgram`: torch and the packages that Megatron imports, which take most of its start.

Megatron and TransformerEngine are not among them. A program imports them itself, after the patches that it wants.
"""

import contextlib

import torch._dynamo
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.experimental._attention
import torch.utils.cpp_extension
import torch.utils.tensorboard  # noqa: F401
import wandb  # noqa: F401

import megatron_overlap.adapters.training.bootstrap
import megatron_overlap.ops  # noqa: F401
from megatron_overlap.patching.manifest import digest_of, load_manifests
from megatron_overlap.patching.source import installed_tree

with contextlib.suppress(ImportError):
    import onnxscript  # noqa: F401  # TransformerEngine imports it, in 0.4 s

_TREE = installed_tree()
assert _TREE is not None
# Digests the sources that the patches of a session rely on, once for all programs.
for manifest in load_manifests():
    for name in (manifest.target, *manifest.relies_on):
        digest_of(_TREE, name)
