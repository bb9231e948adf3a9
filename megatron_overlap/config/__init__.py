"""Configuration of launches and of the overlap: schema, files, presets, arguments of Megatron. No torch."""

from megatron_overlap.config.errors import ConfigError
from megatron_overlap.config.launch import ModelConfig
from megatron_overlap.config.loading import (
    LaunchConfig,
    OverlapConfig,
    arms,
    dump_config,
    load_launch_config,
    load_overlap_file,
    without_overlap,
)
from megatron_overlap.config.megatron_args import to_megatron_args

__all__ = [
    "ConfigError",
    "LaunchConfig",
    "ModelConfig",
    "OverlapConfig",
    "arms",
    "dump_config",
    "load_launch_config",
    "load_overlap_file",
    "to_megatron_args",
    "without_overlap",
]
