"""`megatron-overlap schema`: the JSON Schema of launch configs, for editors."""

from __future__ import annotations

import json
from typing import Any

from megatron_overlap.config.loading import LaunchConfig


def json_schema() -> dict[str, Any]:
    """JSON Schema of one config file: the launch config, `base`, and presets that fill in a model."""
    schema = LaunchConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["base"] = {
        "description": "Config files that this one starts from, relative to it.",
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
    }
    # A file with a base, and a section with a preset, need not say everything themselves.
    required = schema.pop("required")
    schema["anyOf"] = [{"required": ["base"]}, {"required": required}]
    for section in schema["$defs"].values():
        section.pop("required", None)
    return schema


def schema() -> None:
    """Print the JSON Schema of launch configs."""
    print(json.dumps(json_schema(), indent=2))
