"""`megatron-overlap compare --logs` on the output of real runs of Megatron (`logs/`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.tools.compare.megatron_logs import read_log, sides
from tests.tools.compare.test_comparison import KEYS, RUN_KEYS

LOGS = Path(__file__).with_name("logs")
STOCK, OVERLAP, OLD = (
    LOGS / name for name in ("megatron_0.19.2.log", "megatron_0.19.2_overlap.log", "megatron_0.16.1.log")
)


def times(log: Path) -> list[float]:
    """Step times from the third field of the lines, read independently of the code under test."""
    rows = [line.split("|") for line in log.read_text().splitlines() if "| consumed samples" in line]
    return [float(row[2].rpartition(":")[2]) for row in rows]


def median(values: list[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


@pytest.mark.parametrize(("file", "seq_length"), [(STOCK, 512), (OVERLAP, 512), (OLD, 64)])
def test_a_log_is_read(file: Path, seq_length: int) -> None:
    log = read_log(file)
    assert (log.world_size, log.seq_length) == (2, seq_length)
    assert [line["step_time_ms"] for line in log.lines.values()] == times(file)
    assert list(log.lines) == [1, 2, 3, 4, 5, 6]
    assert all(line["global_batch"] == 2 and line["loss"] and line["grad_norm"] for line in log.lines.values())


def test_the_comparison_has_the_figures_of_the_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["compare", "--logs", str(STOCK), str(OVERLAP), "--output", str(tmp_path), "--peak-tflops", "0.5"]
    assert cli.main(argv) == 0
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written.keys() >= KEYS
    for run, file in zip(written["runs"], (STOCK, OVERLAP), strict=True):
        assert run.keys() >= RUN_KEYS
        assert run["name"] == file.stem
        assert run["step_time_ms"]["median"] == pytest.approx(median(times(file)[2:]))
        assert run["tokens_per_s"] == pytest.approx(2 * 512 / median(times(file)[2:]) * 1000)
        assert run["tokens_per_s_per_device"] == pytest.approx(run["tokens_per_s"] / 2)
        assert len(run["losses"]) == 6
    assert written["speedup"]["median"] == pytest.approx(median(times(STOCK)[2:]) / median(times(OVERLAP)[2:]))
    losses = [[float(text) for text in re.findall(r"lm loss: (\S+)", file.read_text())] for file in (STOCK, OVERLAP)]
    apart = max(abs(b - a) / a for a, b in zip(*losses, strict=True))
    assert written["max_loss_deviation"] == pytest.approx(apart)
    # 0.1 TFLOP/s at 865.2 and 1138.8 ms: FLOPs of a step, over the median time.
    flops = (865.2 + 1138.8) / 2 * 0.1e9
    tflops = flops / (median(times(OVERLAP)[2:]) / 1000) / 1e12
    assert written["runs"][1]["tflops_per_device"] == pytest.approx(tflops)
    assert written["runs"][1]["mfu"] == pytest.approx(tflops / 0.5)
    assert written["runs"][0]["mfu"] is None
    assert (tmp_path / "compare.png").stat().st_size > 20_000
    page = (tmp_path / "compare.html").read_text()
    assert "finished logs" in page
    assert "Fallbacks" not in page
    printed = capsys.readouterr().out
    assert "plugin off" not in printed
    assert "memory" not in printed


def test_runs_are_cut_to_their_common_iterations(tmp_path: Path) -> None:
    lines = STOCK.read_text().splitlines(keepends=True)
    later = tmp_path / "later.log"
    later.write_text("".join(line for line in lines if not re.search(r"iteration +1/", line)))
    first, second = sides([read_log(STOCK), read_log(later)])
    assert first.records[0].iterations == second.records[0].iterations == (2, 3, 4, 5, 6)
    assert first.timed_rounds_ms == [times(STOCK)[3:]]
    assert first.peak is None


def test_warm_up_and_arguments_with_similar_names_do_not_count(tmp_path: Path) -> None:
    lines = OVERLAP.read_text().splitlines()
    arguments = [re.sub(r"(encoder_seq_length .*) 512", r"\1 64", line) for line in lines]
    changed = tmp_path / "changed.log"
    # In another order, with a high rate in the first iteration.
    changed.write_text("\n".join(reversed(arguments[:10])) + "\n" + "\n".join(arguments[10:]))
    changed.write_text(changed.read_text().replace("(TFLOP/s/GPU): 0.0", "(TFLOP/s/GPU): 9.0", 1))
    first, second = sides([read_log(OVERLAP), read_log(changed)])
    assert first.workload == second.workload
    assert second.workload.tokens == 2 * 512


def test_a_rate_that_the_log_rounds_to_zero_is_not_missing(tmp_path: Path) -> None:
    changed = tmp_path / "changed.log"
    changed.write_text(re.sub(r"(\(TFLOP/s/GPU\): )\d+\.\d", r"\g<1>0.0", OVERLAP.read_text()))
    workload = sides([read_log(OVERLAP), read_log(changed)])[1].workload
    assert (workload.flops, workload.flops_convention) == (None, "0.0 in the log, which has one decimal")


def test_figures_that_a_log_lacks_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Iteration lines without throughput, as another tool may save them; the output of two ranks in one file."""
    text = "".join(line for line in STOCK.read_text().splitlines(keepends=True) if "consumed" in line)
    bare = re.sub(r" throughput per GPU[^|]*\|", "", text)
    (tmp_path / "a.log").write_text("".join(line * 2 for line in bare.splitlines(keepends=True)))
    (tmp_path / "b.log").write_text(bare)
    logs = [str(tmp_path / name) for name in ("a.log", "b.log")]
    assert cli.main(["compare", "--logs", *logs, "--output", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert written["speedup"]["median"] == 1
    assert {run["tokens_per_s"] for run in written["runs"]} == {None}
    assert "tokens/s" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (r" \[\S+ \S+\] ", " [2025-09-30 11:02:03] "),  # 0.14 and before: no microseconds
        (r" \[\S+ \S+\] ", " "),  # before 0.8: no time
        (r"\| elapsed", "| skipped samples:            3 | elapsed"),
        (r"\| learning", "| energy per GPU (J/iter/GPU): 7.5 | power per GPU (W/GPU): 300.2 | learning"),
        (r"\| global", "| decoupled learning rate: 1.000000E-04 | global"),
        (r"\| lm loss", "| load_balancing_loss: 1.005160E+00 | mtp_1 loss: 9.1E+00 | lm loss"),
        (r"\| number of skipped", "| num zeros: 0 | params norm: 105.125 | number of skipped"),
        (r"(?m)^ ", "[rank7]:  "),
        (r"(?m)^ ", "15: node3:  "),
        (r"(elapsed time per iteration \(ms\): )(\S+)", r"\1\2/999.9"),  # Primus prints the mean after it
    ],
)
def test_lines_of_other_releases_and_launchers_are_read(old: str, new: str, tmp_path: Path) -> None:
    """Fields that `training_log` of other releases writes between, before and after."""
    changed = tmp_path / "changed.log"
    text, number = re.subn(old, new, STOCK.read_text())
    timers = "    forward-backward ...............................: (1690.10, 1690.22)\n"
    seen = " validation loss at iteration 3 | lm loss value: 7.9E+00 | lm loss PPL: 2.9E+03 |\n"
    changed.write_text(timers + text + seen)
    assert number >= 6
    assert read_log(changed).lines == read_log(STOCK).lines


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{stock}"], "give at least two logs"),
        (["{stock}", "{tmp}/none.log"], "none.log: no such file or directory; give the log of a finished run"),
        (["{stock}", "{tmp}/empty.log"], "has no line with `elapsed time per iteration (ms)`"),
        (["{stock}", "{tmp}/twice.log"], "iteration 1 comes after iteration 6: give one file for each run"),
        (["{stock}", "{tmp}/short.log"], "has 2 iterations in common with the other logs; at least 3 are needed"),
        (["{stock}", "{overlap}", "--attribute"], "leave it out with --logs"),
        (["{stock}", "{overlap}", "--rounds", "3"], "--rounds: 3: has no effect with --logs"),
        (["{stock}", "{overlap}", "--generate"], "--generate: true: has no effect with --logs"),
        (["{stock}", "{overlap}", "--output", "/proc"], "--output: /proc: No such file or directory"),
        (["{stock}", "{tmp}/ranks.log"], "world_size is 4, not 2 as in"),
        (["{stock}", "{tmp}/length.log"], "seq_length is 1024, not 512 as in"),
        (["{stock}", "{tmp}/batch.log"], "global batch size of iteration 1 is 8, not 2 as in"),
    ],
)
def test_wrong_requests_are_one_line(
    argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STOCK.read_text()
    (tmp_path / "empty.log").write_text("nothing\n")
    (tmp_path / "twice.log").write_text(text + OLD.read_text())
    (tmp_path / "short.log").write_text("".join(text.splitlines(keepends=True)[:-4]))
    changes = {"ranks": (r"(world_size \.+) 2", r"\1 4"), "length": (r"(seq_length \.+) 512", r"\1 1024")}
    changes["batch"] = r"(global batch size:\s+)2", r"\g<1>8"
    for name, (old, new) in changes.items():
        (tmp_path / f"{name}.log").write_text(re.sub(old, new, text))
    places = {"stock": STOCK, "overlap": OVERLAP, "tmp": tmp_path}
    assert cli.main(["compare", "--logs", *(word.format(**places) for word in argv)]) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("end", ["lm loss: 5.000000E", "lm loss: 5.0", "elapsed time per iteration (ms): 8"])
def test_the_last_line_of_a_killed_run_does_not_count(end: str, tmp_path: Path) -> None:
    name, _, _ = end.partition(":")
    rows = STOCK.read_text().splitlines(keepends=True)
    last = max(number for number, row in enumerate(rows) if "| consumed samples" in row)
    (tmp_path / "killed.log").write_text("".join(rows[:last]) + rows[last].partition(name)[0] + end)
    lines = read_log(tmp_path / "killed.log").lines
    assert {number: line for number, line in lines.items() if number < 6} == {
        number: line for number, line in read_log(STOCK).lines.items() if number < 6
    }
    assert "loss" not in lines.get(6, {})


def test_a_peak_without_logs_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "x.yaml", "--peak-tflops", "1"]) == 2
    assert "--peak-tflops: 1.0: needs --logs" in capsys.readouterr().err


def test_skipped_steps_and_lines_without_a_loss_are_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = OVERLAP.read_text()
    skipped, nan = tmp_path / "skipped.log", tmp_path / "nan.log"
    skipped.write_text(re.sub(r"(skipped iterations:\s+)0", r"\g<1>1", text))
    nan.write_text(re.sub(r"lm loss:[^|]*\|", "", text))
    assert cli.main(["compare", "--logs", str(STOCK), str(skipped), str(nan), "--output", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert f"- {skipped}: 6 steps were skipped: they updated no weights" in printed
    assert f"- {nan}: 6 of 6 lines have no loss" in printed


def test_an_infinite_loss_is_not_comparable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infinite = tmp_path / "infinite.log"
    infinite.write_text(re.sub(r"lm loss: [^|]*\|", "lm loss: INF |", OVERLAP.read_text()))
    assert cli.main(["compare", "--logs", str(STOCK), str(infinite), "--output", str(tmp_path / "out")]) == 1
    assert "inf in the other" in capsys.readouterr().err
