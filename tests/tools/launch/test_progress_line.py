"""`progress_line` on lines of Megatron-LM and of the plugin."""

from __future__ import annotations

import pytest

from megatron_overlap.tools.launch.command import progress_line

OLD = (
    " [2025-11-21 05:30:47.123456] iteration        4/      20 | consumed samples:            8 | elapsed time per"
    " iteration (ms): 391.3 | learning rate: 1.2E-04 | global batch size:     2 | lm loss: 8.082650E+00 | loss scale:"
    " 1.0 | grad norm: 3.353 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
THROUGHPUT = OLD.replace("(ms): 391.3 |", "(ms): 391.3 | throughput per GPU (TFLOP/s/GPU): 12.5 |")
SKIPPED = OLD.replace("skipped iterations:   0", "skipped iterations:   2").replace("8.082650E+00", "nan")


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (OLD, "iteration 4/20: 391.3 ms, lm loss 8.08265, grad norm 3.353"),
        (f"[default1]:{OLD}", "iteration 4/20: 391.3 ms, lm loss 8.08265, grad norm 3.353"),
        (THROUGHPUT, "iteration 4/20: 391.3 ms, lm loss 8.08265, grad norm 3.353, 12.5 TFLOP/s per device"),
        (SKIPPED, "iteration 4/20: 391.3 ms, lm loss nan, grad norm 3.353, skipped 2"),
        ("megatron_overlap is active: all patches applied", "megatron_overlap is active: all patches applied"),
        ("┏━━━━━━┳━━━━┓", "┏━━━━━━┳━━━━┓"),
        ("overlap check: step 4: 2 comparisons, worst x", "overlap check: step 4: 2 comparisons, worst x"),
        (
            "  successfully saved checkpoint from iteration      10 to /x ",
            "  successfully saved checkpoint from iteration      10 to /x",
        ),
        (
            " validation loss at iteration 10 | lm loss value: 5.1E+00 |",
            " validation loss at iteration 10 | lm loss value: 5.1E+00 |",
        ),
        ("  num_layers ............ 2", None),
        ("time to initialize megatron (seconds): 1.2", None),
        ("megatron_overlap.patching.errors.PatchRefused: no", None),
        ("", None),
    ],
)
def test_progress_line(line: str, shown: str | None) -> None:
    assert progress_line(line) == shown
