#!/usr/bin/env python
"""Makes Megatron's data from a folder of text: a BPE tokenizer, a .bin/.idx pair and a description.

    python scripts/prepare_data.py --output data/stdlib                # Python's own sources: on every machine
    python scripts/prepare_data.py my_texts --output data/my_texts --pattern '**/*.txt'

One file is one document, ended by `<|endoftext|>`. The same input gives the same bytes. A run that was interrupted
leaves nothing that looks complete; the next one goes on with the tokenizer if it was done.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import shutil
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_DOCUMENT = "<|endoftext|>"
DEFAULT_VOCAB_SIZE = 4000  # Megatron pads it to 4096 for every tensor parallel size up to 32
MIN_VOCAB_SIZE = 258  # 256 bytes, one merge, end of document
FORMAT = 1
DESCRIPTION, TOKENIZER, PREFIX = "data.json", "tokenizer.json", "tokens"
PARTIAL, LOCK = ".partial", ".lock"
BATCH_BYTES = 1 << 18  # text encoded at a time; small enough for the bar to move
_SNIFF_BYTES = 8192


class UsageError(ValueError):
    """The request is wrong; the text is the one line to print."""


@dataclass(frozen=True)
class Corpus:
    """The documents, in the order they are written.

    Attributes:
        source: what the description says about where they come from.
        root: folder that all of them are under.
        files: the documents.
        skipped: files left out because they are empty or not text.
        sha256: of every document's relative name and content.
    """

    source: str
    root: Path
    files: tuple[Path, ...]
    skipped: int
    sha256: str

    def texts(self) -> Iterator[str]:
        """One document after the other."""
        for file in self.files:
            yield file.read_bytes().decode("utf-8", errors="replace")


def standard_library() -> Path:
    """The folder of the running interpreter's own sources."""
    return Path(sysconfig.get_paths()["stdlib"])


def find_corpus(root: Path, source: str, pattern: str, leave_out: Sequence[Path], limit: int | None) -> Corpus:
    """Look for the documents under a folder.

    Args:
        root: folder to search.
        source: name of the input for the description.
        pattern: glob relative to the folder.
        leave_out: folders that are not searched.
        limit: largest number of documents, None for all.

    Raises:
        UsageError: there is no document, or the pattern is no relative glob.
    """
    files, skipped, digest = [], 0, hashlib.sha256()
    try:
        found = sorted(root.glob(pattern))
    except (ValueError, NotImplementedError):
        remedy = "give a glob relative to the folder, such as '**/*.txt'"
        raise UsageError(f"command line: --pattern: {pattern!r}: {remedy}") from None
    for file in found:
        name = file.relative_to(root)
        hidden = any(part.startswith(".") for part in name.parts)
        if hidden or not file.is_file() or any(file.is_relative_to(folder) for folder in leave_out):
            continue
        content = file.read_bytes()
        if not content or b"\0" in content[:_SNIFF_BYTES]:
            skipped += 1
            continue
        files.append(file)
        digest.update(name.as_posix().encode() + b"\0" + hashlib.sha256(content).digest())
        if len(files) == limit:
            break
    if not files:
        raise UsageError(f"{root}: no text file matches {pattern}; give another folder or --pattern")
    return Corpus(source, root, tuple(files), skipped, digest.hexdigest())


def standard_library_corpus(limit: int | None) -> Corpus:
    """Python's own sources, without tests and installed packages."""
    root = standard_library()
    tests = [folder for name in ("test", "tests", "idle_test") for folder in root.rglob(name) if folder.is_dir()]
    source = f"Python {sys.version.split()[0]} standard library"
    packages = [root / "site-packages", root / "dist-packages"]
    return find_corpus(root, source, "**/*.py", [*packages, *tests], limit)


def train_tokenizer(corpus: Corpus, vocab_size: int, progress: Progress) -> Tokenizer:
    """A byte-level BPE whose last id is the end of a document.

    Args:
        corpus: the documents.
        vocab_size: number of ids, end of document included; a small corpus may give fewer.
        progress: shows the documents as they are read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        progress.track(corpus.texts(), total=len(corpus.files), description="tokenizer"), trainer
    )
    # Added last, so that it is the last id: what Megatron's NullTokenizer takes for the end of a document.
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def write_tokens(corpus: Corpus, tokenizer: Tokenizer, prefix: Path, progress: Progress) -> int:
    """Write every document's ids, each followed by the end of a document, as Megatron's .bin/.idx pair.

    Returns:
        The number of ids written.
    """
    import numpy

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron tells which accelerators are missing; none is used here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    # A text that quotes the end-of-document mark must not end there.
    tokenizer.encode_special_tokens = True
    end = tokenizer.get_vocab_size() - 1
    dtype = DType.optimal_dtype(tokenizer.get_vocab_size())
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    total = 0
    task = progress.add_task("tokens", total=len(corpus.files))
    for batch in _batches(corpus.texts()):
        for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
            ids = numpy.array([*encoding.ids, end], dtype=dtype)
            builder.add_document(ids, [len(ids)])
            total += len(ids)
        progress.advance(task, len(batch))
    builder.finalize(f"{prefix}.idx")
    return total


def _batches(texts: Iterator[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def prepare(corpus: Corpus, output: Path, vocab_size: int, console: Console, *, again: bool) -> dict[str, Any]:
    """Make the folder, or leave it as it is when it already holds just this.

    Returns:
        The description, as it stands in `data.json`.
    """
    import tokenizers

    wanted = {
        "format": FORMAT,
        "source": corpus.source,
        "sha256": corpus.sha256,
        "requested_vocab_size": vocab_size,
        "tokenizers": tokenizers.__version__,
    }
    present = _read_json(output / DESCRIPTION)
    if not again and present is not None and wanted.items() <= present.items() and _complete(output, present):
        console.print(f"{output}: already there, nothing to do")
        return present
    partial = output / PARTIAL
    if again or _read_json(partial / DESCRIPTION) != wanted:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        _write_json(partial / DESCRIPTION, wanted)
    columns = (TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        tokenizer = _tokenizer(corpus, vocab_size, partial / TOKENIZER, progress)
        num_tokens = write_tokens(corpus, tokenizer, partial / PREFIX, progress)
    size = tokenizer.get_vocab_size()
    description = {
        **wanted,
        "vocab_size": size,
        "eod_id": size - 1,
        "documents": len(corpus.files),
        "skipped_files": corpus.skipped,
        "tokens": num_tokens,
        "tokenizer": TOKENIZER,
        "prefix": PREFIX,
    }
    _publish(partial, output, description)
    return description


def _tokenizer(corpus: Corpus, vocab_size: int, file: Path, progress: Progress) -> Tokenizer:
    from tokenizers import Tokenizer

    if file.is_file():
        progress.console.print("going on after an interruption: the tokenizer is there")
        return Tokenizer.from_file(str(file))
    tokenizer = train_tokenizer(corpus, vocab_size, progress)
    _write(file, tokenizer.to_str(pretty=True))
    return tokenizer


def _publish(partial: Path, output: Path, description: dict[str, Any]) -> None:
    """Move the finished files in place, so that at no moment half of two data sets looks like one."""
    (output / DESCRIPTION).unlink(missing_ok=True)
    (output / f"{PREFIX}.idx").unlink(missing_ok=True)
    # Megatron keeps its sample order beside the data and finds it by the path alone: it would be another data's.
    shutil.rmtree(output / "cache" / "GPTDataset_indices", ignore_errors=True)
    for name in (TOKENIZER, f"{PREFIX}.bin", f"{PREFIX}.idx"):
        (partial / name).replace(output / name)
    _write_json(output / DESCRIPTION, description)
    shutil.rmtree(partial)


def _complete(output: Path, description: dict[str, Any]) -> bool:
    names = (TOKENIZER, f"{PREFIX}.bin", f"{PREFIX}.idx")
    return "tokens" in description and all((output / name).is_file() for name in names)


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _write_json(file: Path, content: dict[str, Any]) -> None:
    _write(file, json.dumps(content, indent=1) + "\n")


def _write(file: Path, text: str) -> None:
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)


@contextmanager
def _only_one(output: Path) -> Iterator[None]:
    """Make and hold the folder; the kernel lets go when this process ends, however it ends."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        lock = (output / LOCK).open("w")
    except OSError as error:
        remedy = "give a folder that can be written"
        raise UsageError(f"command line: --output: {output}: {error.strerror}; {remedy}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{output}: another prepare_data.py is writing it; wait, or use another folder") from None
        yield


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"command line: {message}; see --help")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    parser.add_argument("input", nargs="?", type=Path, help="folder of text files; without it as --stdlib")
    parser.add_argument("--stdlib", action="store_true", help="use the sources of Python's standard library")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--pattern", default="**/*", help="files of the folder (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, help="token ids (default: %(default)s)")
    parser.add_argument("--max-documents", type=int, help="use the first N documents")
    parser.add_argument("--force", action="store_true", help="replace existing output")
    options = parser.parse_args(argv)
    if options.stdlib and options.input is not None:
        raise UsageError(f"command line: --stdlib and {options.input}: give one of them")
    if options.input is not None and not options.input.is_dir():
        raise UsageError(f"{options.input}: no such folder; give a folder of text files, or --stdlib")
    if options.vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(f"command line: --vocab-size: {options.vocab_size}: must be at least {MIN_VOCAB_SIZE}")
    if options.max_documents is not None and options.max_documents < 1:
        raise UsageError(f"command line: --max-documents: {options.max_documents}: must be at least 1")
    return options


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code: 0 done, 1 failed, 2 wrong request, 130 interrupted."""
    console = Console(stderr=True)
    try:
        options = _parse(argv)
        output: Path = options.output
        with _only_one(output):
            if options.input is None:
                corpus = standard_library_corpus(options.max_documents)
            else:
                root = options.input.resolve()
                limit = options.max_documents
                corpus = find_corpus(root, str(root), options.pattern, [output.resolve()], limit)
            made = prepare(corpus, output, options.vocab_size, console, again=options.force)
    except UsageError as error:
        print(error, file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        print(f"{error}; install it: pip install tokenizers megatron-core", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"{error.filename}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on", file=sys.stderr)
        return 130
    print(
        f"{output}: {made['documents']} documents, {made['tokens']} tokens, {made['vocab_size']} ids "
        f"(end of document: {made['eod_id']}) from {made['source']}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
