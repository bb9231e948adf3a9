"""`megatron-overlap plan`: the printed layout, and wrong requests; the picture of a layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_overlap import cli
from megatron_overlap.schedules.varlen import Topology, partition
from megatron_overlap.tools.plan import read_lengths
from scripts.bench.document_lengths import sample
from scripts.draw_partition import draw

DOCS = str(Path(__file__).parents[2] / "docs")


def test_the_layout_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = tmp_path / "lengths.txt"
    listing.write_text("\n".join(map(str, sample("wlb", 300000, 2))))
    options = ["--lengths", str(listing), "--ranks", "8", "--nodes", "2", "--nics", "4"]
    assert cli.main(["plan", *options]) == 0
    text = capsys.readouterr().out
    assert "300000 tokens on 8 ranks (2 x 4)" in text
    assert "rank 7:" in text
    assert "lower bound" in text


def test_a_layout_with_whole_documents_and_both_kinds_of_rings_is_drawn() -> None:
    layout = partition(sample("wlb", 300000, 2), Topology(2, 4, 4), capacity=39844)
    assert draw(layout).startswith(b"\x89PNG")


def test_the_lengths_of_a_file_with_another_method(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = tmp_path / "lengths.txt"
    listing.write_text("4000\n100\n100\n")
    assert cli.main(["plan", "--lengths", str(listing), "--ranks", "4", "--method", "ring", "--show", "1"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("ring: 3 documents, 4200 tokens on 4 ranks")
    assert "intra-node rings (count x ranks): 3 x 4" in text
    assert "... 3 more ranks" in text


def test_ranks_come_from_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listing = tmp_path / "lengths.txt"
    listing.write_text("60000\n5536\n")
    config = Path(__file__).parents[2] / "configs" / "gpu" / "llama3_8b_tp8" / "overlap.yaml"
    assert cli.main(["plan", str(config), "launch.nodes=4", "--lengths", str(listing)]) == 0
    assert "65536 tokens on 4 ranks (4 x 1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--lengths", DOCS, "--method", "balancd"], "plan --method: balancd: unknown method; did you mean balanced?"),
        ([], "plan: missing: give LENGTHS"),
        (["--lengths", DOCS, "--ranks", "6", "--nodes", "4"], "plan --ranks: 6: give a multiple of the 4 nodes"),
        (["--lengths", "nowhere.txt"], "nowhere.txt: No such file or directory"),
        (["--lengths", 300 * "a"], "File name too long"),
        (["--lengths", DOCS, "--capacity", "2"], "raise capacity to"),
        (["--lengths", f"{DOCS}/images/fused_kernels.png"], "fused_kernels.png: is not UTF-8 text"),
        (["--lengths", DOCS, "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_a_wrong_request_is_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert text in error
    assert error.count("\n") == 1


def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "megatron_overlap.cli", "plan", "--lengths", DOCS]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    expected = "megatron-overlap: cannot write the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


def test_lengths_are_read_from_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "a.py").write_text("12345")
    (tmp_path / "b" / "c.txt").write_text("123")
    (tmp_path / "b" / "d.bin").write_text("ignored")
    assert read_lengths(tmp_path) == [5, 3]
    listing = tmp_path / "lengths.txt"
    listing.write_text("7\n\n 12 \n0\n")
    assert read_lengths(listing) == [7, 12, 0]
    listing.write_text("7\n-3\n")
    with pytest.raises(ValueError, match="line 2: -3"):
        read_lengths(listing)
    listing.write_text("\n")
    with pytest.raises(ValueError, match="empty"):
        read_lengths(listing)
    with pytest.raises(ValueError, match="in this folder"):
        read_lengths(tmp_path / "e") if (tmp_path / "e").mkdir() else read_lengths(tmp_path / "e")
