"""A training script: the provided one, with gradient accumulation fusion switched on in every layer.

Megatron refuses the flag without apex, whose kernel its own path needs; the plugin's path does not.
"""

from typing import Any

from scripts import pretrain_decoder as pretrain

build_model = pretrain.build_model


def fused_model(*args: Any, **kwargs: Any) -> Any:
    model = build_model(*args, **kwargs)
    for module in model.modules():
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = True
    return model


if __name__ == "__main__":
    pretrain.build_model = fused_model
    pretrain.pretrain_decoder()
