"""Named model shapes and the defaults of each architecture, from `configs/models/presets.yaml`.

A `model` section merges the defaults of the architecture, the preset and the keys of the section.
"""

from collections.abc import Mapping
from types import MappingProxyType

import yaml

from megatron_overlap.config.resources import resource_folder

Fields = Mapping[str, object]

_CONTENT: Mapping[str, Mapping[str, Fields]] = yaml.safe_load(
    (resource_folder("configs") / "models" / "presets.yaml").read_text(encoding="utf-8")
)
ARCHITECTURES: Mapping[str, Fields] = MappingProxyType(_CONTENT["architectures"])
PRESETS: Mapping[str, Fields] = MappingProxyType(_CONTENT["presets"])
