"""The launches of `scripts/fuzz.py --trainings`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import yaml
from megatron.training.arguments import add_megatron_arguments

from megatron_overlap.config import ConfigError, load_launch_config
from scripts.trust.launches import FLAGS, MIXTURES, drawn_launch


def test_megatron_has_their_flags() -> None:
    parser = add_megatron_arguments(argparse.ArgumentParser())
    words = [word for pool in FLAGS.values() for word in pool.replace(";", " ").split()]
    words += [word for flags in MIXTURES for word in flags]
    flags = {word for word in words if word.startswith("--")}
    assert len(flags) > 80
    assert flags <= {option for action in parser._actions for option in action.option_strings}


def test_most_are_valid_configs(tmp_path: Path) -> None:
    refused = []
    for number in range(100):
        file = tmp_path / "launch.yaml"
        content = {"name": "drawn", **drawn_launch(random.Random(number))}
        file.write_text(yaml.safe_dump(content))
        try:
            load_launch_config(file)
        except ConfigError as error:
            refused.append(str(error))
    assert len(refused) < 5, refused
