"""`megatron-overlap schema`: the JSON Schema of launch configs, for editors."""

from __future__ import annotations

import json
from typing import Any

from megatron_overlap.config.loading import LaunchConfig


def json_schema() -> dict[str, Any]:
    """JSON Schema of a config file: the launch config with `base`, and optional keys for presets."""
    schema = LaunchConfig.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["base"] = {
        "description": "Base config files, relative to this file.",
        "anyOf": [{"type": "string"}, {"items": {"type": "string"}, "type": "array"}],
    }
    # Keys are optional in a file with a base and in a section with a preset.
    required = schema.pop("required")
    schema["anyOf"] = [{"required": ["base"]}, {"required": required}]
    for section in schema["$defs"].values():
        section.pop("required", None)
    return schema


def schema() -> None:
    """Print the JSON Schema of launch configs."""
    print(json.dumps(json_schema(), indent=2))
