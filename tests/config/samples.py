"""A small launch config that is right, for tests that break it in one place."""

from __future__ import annotations

from pathlib import Path

RIGHT = """\
name: sample
model: {preset: llama_tiny}
parallel: {tensor: 2, sequence_parallel: true}
train:
  seq_length: 128
  global_batch_size: 4
  iterations: 5
launch: {device: cpu}
"""


def write(folder: Path, text: str = RIGHT, name: str = "sample.yaml") -> Path:
    """A config file in a folder."""
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file
