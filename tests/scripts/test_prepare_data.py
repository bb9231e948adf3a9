"""prepare_data.py, run for real: what it writes is read back by Megatron, and real signals interrupt it."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy
import pytest
from tokenizers import Tokenizer

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"
FILES = ("tokenizer.json", "tokens.bin", "tokens.idx", "data.json")

DOCUMENTS = {
    "a.txt": "The quick brown fox jumps over the lazy dog.\n" * 30,
    "b/deep/c.txt": "def f(x):\n    return x + 1\n" * 20,
    "quotes.txt": "a text about <|endoftext|> must not end there\n",
    "z.txt": "äöü 中文 \t tabs\n",
}


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["prepare_data"] = module
    spec.loader.exec_module(module)
    return module


prepare_data = load()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    for name, text in DOCUMENTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    (root / "latin1.txt").write_bytes("caf\xe9\n".encode("latin-1"))
    (root / "picture.png").write_bytes(b"\x89PNG\0\0")
    (root / "empty.txt").write_bytes(b"")
    (root / ".hidden").write_text("secret")
    return root


def make(*args: object) -> int:
    return int(prepare_data.main([str(arg) for arg in args]))


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in FILES}


def test_megatron_reads_back_every_document(texts: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    out = tmp_path / "out"
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    described = json.loads((out / "data.json").read_text())
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    data = IndexedDataset(str(out / "tokens"), mmap=True)

    expected = [*DOCUMENTS.items(), ("latin1.txt", "caf\N{REPLACEMENT CHARACTER}\n")]
    assert len(data) == described["documents"] == len(expected)
    assert described["skipped_files"] == 2
    end = described["eod_id"]
    assert end == described["vocab_size"] - 1 == tokenizer.token_to_id("<|endoftext|>")
    for ids, (_, text) in zip(data, sorted(expected), strict=True):
        assert ids[-1] == end
        assert end not in ids[:-1]
        assert tokenizer.decode(ids[:-1].tolist()) == text
    assert described["tokens"] == sum(len(ids) for ids in data)
    assert described["vocab_size"] == 300
    assert data[0].dtype == numpy.uint16


def test_megatron_trains_on_samples_of_it(texts: Path, tmp_path: Path) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.tokenizers import MegatronTokenizer

    out = tmp_path / "out"
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    described = json.loads((out / "data.json").read_text())
    tokenizer = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "null-text"}, vocab_size=described["vocab_size"]
    )
    assert tokenizer.eod == described["eod_id"]
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=16,
        blend=([str(out / "tokens")], None),
        split="100,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        path_to_cache=str(tmp_path / "cache"),
    )
    train, _, _ = BlendedMegatronDatasetBuilder(GPTDataset, [64, 0, 0], lambda: True, config).build()
    sample = train[0]
    assert sample["tokens"].shape == (16,)
    ends = sum(int((train[i]["tokens"] == described["eod_id"]).sum()) for i in range(64))
    masked = sum(int((train[i]["loss_mask"] == 0).sum()) for i in range(64))
    assert ends == masked > 0


def test_same_input_same_bytes_and_no_second_time(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("one", "two"):
        assert make(texts, "--output", tmp_path / name, "--vocab-size", 300) == 0
    assert content(tmp_path / "one") == content(tmp_path / "two")
    before = (tmp_path / "one" / "tokens.bin").stat().st_mtime_ns
    capsys.readouterr()
    assert make(texts, "--output", tmp_path / "one", "--vocab-size", 300) == 0
    assert "nothing to do" in capsys.readouterr().err
    assert (tmp_path / "one" / "tokens.bin").stat().st_mtime_ns == before
    assert make(texts, "--output", tmp_path / "one", "--vocab-size", 300, "--force") == 0
    assert (tmp_path / "one" / "tokens.bin").stat().st_mtime_ns > before
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_a_changed_input_is_made_again_and_megatrons_cache_of_the_old_one_is_gone(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    old = content(out)
    cache = out / "cache" / "GPTDataset_indices" / "x.npy"
    cache.parent.mkdir(parents=True)
    cache.write_bytes(b"sample order of the old data")
    (texts / "new.txt").write_text("one more document\n")
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    assert content(out)["tokens.bin"] != old["tokens.bin"]
    assert json.loads((out / "data.json").read_text())["documents"] == len(DOCUMENTS) + 2
    assert not cache.exists()


def test_output_inside_the_input_is_not_input(texts: Path) -> None:
    out = texts / "out"
    for _ in range(2):
        assert make(texts, "--output", out, "--vocab-size", 300, "--force") == 0
        assert json.loads((out / "data.json").read_text())["documents"] == len(DOCUMENTS) + 1


def in_training(partial: Path) -> bool:
    return (partial / "data.json").exists()


def in_writing(partial: Path) -> bool:
    return (partial / "tokens.bin").exists()


@pytest.mark.long
@pytest.mark.parametrize(
    ("reached", "number", "code"),
    [
        (in_training, signal.SIGKILL, -signal.SIGKILL),
        (in_writing, signal.SIGKILL, -signal.SIGKILL),
        (in_writing, signal.SIGINT, 130),
    ],
)
def test_interrupted_then_run_again(
    reached: Callable[[Path], bool], number: signal.Signals, code: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    options = ["--stdlib", "--max-documents", "150", "--vocab-size", "1000"]
    with subprocess.Popen(
        [sys.executable, str(SCRIPT), *options, "--output", str(out)], stderr=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 60
        while not reached(out / ".partial") and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(number)
        _, said = process.communicate()
    assert process.returncode == code
    assert not (out / "data.json").exists()
    assert not (out / "tokens.idx").exists()
    if number == signal.SIGINT:
        assert "interrupted" in said
        assert "Traceback" not in said

    (out / ".partial" / "tokens.bin").write_bytes(b"half")
    assert make(*options, "--output", out) == 0
    assert not (out / ".partial").exists()
    assert make(*options, "--output", tmp_path / "whole") == 0
    assert content(out) == content(tmp_path / "whole")


def test_a_tokenizer_that_was_done_is_used_after_an_interruption(
    texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"

    def interrupt(*_: object) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "write_tokens", interrupt)
        assert make(texts, "--output", out, "--vocab-size", 300) == 130
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    assert "the tokenizer is there" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "write_tokens", interrupt)
        assert make(texts, "--output", out, "--vocab-size", 290) == 130
    # Another request does not inherit it.
    assert make(texts, "--output", out, "--vocab-size", 280) == 0
    assert "the tokenizer is there" not in capsys.readouterr().err
    assert json.loads((out / "data.json").read_text())["vocab_size"] == 280


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stdlib"], "--output"),
        (["{missing}", "--output", "{out}"], "no such folder"),
        (["{texts}", "--stdlib", "--output", "{out}"], "give one of them"),
        (["{texts}", "--output", "{out}", "--vocab-size", "100"], "at least 258"),
        (["{texts}", "--output", "{out}", "--vocab-size", "many"], "--vocab-size"),
        (["{texts}", "--output", "{out}", "--max-documents", "0"], "at least 1"),
        (["{texts}", "--output", "{out}", "--pattern", "*.rst"], "no text file matches *.rst"),
        (["{texts}", "--output", "{out}", "--pattern", ""], "--pattern: '': give a glob relative to the folder"),
        (["{texts}", "--output", "{out}", "--pattern", "/x/*"], "--pattern: '/x/*': give a glob relative"),
        (["{texts}", "--output", "/proc/x"], "--output: /proc/x: No such file or directory; give a folder"),
        (["{texts}", "--output", "{out}", "--wat"], "--wat"),
    ],
)
def test_wrong_request_is_one_line(
    options: list[str], says: str, texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"texts": texts, "out": tmp_path / "out", "missing": tmp_path / "missing"}
    assert make(*(option.format(**names) for option in options)) == 2
    said = capsys.readouterr().err
    assert says in said
    assert said.count("\n") == 1


def test_two_at_once_do_not_mix(texts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / ".lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert make(texts, "--output", out, "--vocab-size", 300) == 2
    assert "another prepare_data.py" in capsys.readouterr().err
    assert make(texts, "--output", out, "--vocab-size", 300) == 0


def test_half_put_in_place_is_not_taken_for_data(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    (texts / "new.txt").write_text("one more document\n")

    def ids_without_index(*arguments: object) -> int:
        Path(f"{arguments[2]}.bin").write_bytes(b"new ids")
        return 1

    with monkeypatch.context() as patch:
        patch.setattr(prepare_data, "write_tokens", ids_without_index)
        assert make(texts, "--output", out, "--vocab-size", 300) == 1  # the .idx is not there to be moved
    assert (out / "tokens.bin").read_bytes() == b"new ids"
    assert not (out / "tokens.idx").exists()
    assert not (out / "data.json").exists()
    assert make(texts, "--output", out, "--vocab-size", 300) == 0
    assert json.loads((out / "data.json").read_text())["documents"] == len(DOCUMENTS) + 2
