"""Registers this plugin's flags with Megatron's argument parser.

Scripts pass their own ``extra_args_provider``, so the flags are added where every script's parser is built; they
then show in Megatron's argument dump and are stored in its checkpoints like any other.
"""

import argparse
import functools
from typing import Any


def add_overlap_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds the plugin's own flags to ``parser`` and returns it."""
    group = parser.add_argument_group("megatron_overlap")
    group.add_argument("--overlap-config", metavar="FILE", default=None, help="overlap or launch config (YAML)")
    group.add_argument(
        "--overlap-run-dir",
        metavar="DIR",
        default=None,
        help="write steps, versions and the report of each rank here",
    )
    group.add_argument(
        "--overlap-trace",
        action="store_true",
        help="also write when each rank computed, waited and sent; see megatron-overlap trace",
    )
    group.add_argument(
        "--overlap-device",
        choices=("cpu", "cuda"),
        default=None,
        help="device to train on; default: launch.device of the config, else cuda",
    )
    return parser


def register() -> None:
    """Makes Megatron's parser accept the plugin's flags, whatever script is run."""
    from megatron.training import arguments

    original = arguments.add_megatron_arguments

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        return add_overlap_arguments(original(parser, *args, **kwargs))

    arguments.add_megatron_arguments = add_megatron_arguments
