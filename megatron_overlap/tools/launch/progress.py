"""Which lines of a Megatron run a person wants to see while it runs, and how."""

from __future__ import annotations

import re

_ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+)\s*\|")
# Not anchored: the fields around them differ between Megatron's releases.
_FIELDS = (
    ("{} ms", re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")),
    ("lm loss {}", re.compile(r"lm loss: ([-+.\deEnaif]+)")),
    ("grad norm {}", re.compile(r"grad norm: ([-+.\deEnaif]+)")),
    ("{} TFLOP/s per device", re.compile(r"throughput per GPU \(TFLOP/s/GPU\): ([\d.]+)")),
    ("skipped {}", re.compile(r"number of skipped iterations:\s+([1-9]\d*)")),
)
_EVENTS = re.compile(r"validation loss at|successfully (?:saved|loaded) checkpoint|exiting program at", re.IGNORECASE)
_TORCHRUN = re.compile(r"^\[\w+?\d+\]:")  # put before every line of a rank
# The plugin's report: two lines of text, then titled tables.
_REPORT = re.compile(
    r"^(?:megatron_overlap is |tensor: |patches\s*$|calls on this rank\s*$|autotuning\s*$|[\u2500-\u257f])"
)


def show(line: str) -> str | None:
    """What to print for a line of a rank; None: nothing.

    An iteration becomes `iteration 3/20: 412.5 ms, lm loss 4.608128, grad norm 3.286`.
    """
    line = _TORCHRUN.sub("", line)
    found = _ITERATION.search(line)
    if found is not None:
        fields = [text.format(_plain(match[1])) for text, pattern in _FIELDS if (match := pattern.search(line))]
        return f"iteration {found[1]}/{found[2]}: {', '.join(fields)}"
    if _EVENTS.search(line) or _REPORT.search(line):
        return line.rstrip()
    return None


def iteration_of(line: str) -> int | None:
    """The number of the iteration that a line of a rank logs; None where it logs none."""
    found = _ITERATION.search(line)
    return None if found is None else int(found[1])


def _plain(number: str) -> str:
    return f"{float(number):.6g}" if "E" in number.upper() else number
