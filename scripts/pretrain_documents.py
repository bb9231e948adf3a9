"""Documents of Megatron's .bin/.idx pairs, and the loaders of a training run."""

from typing import Any

import numpy as np
from megatron.core import mpu
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_overlap.adapters.varlen.core_attention import VarlenAdapter, VarlenError
from megatron_overlap.adapters.varlen.loader import DocumentLoader

_SPLITS = ("training", "validation", "test")


class IndexedDocuments:
    """A range of the documents of a .bin/.idx pair; see `adapters.varlen.loader.Documents`.

    A document of n ids has n - 1 rows, each with an id and the next id. A document with more rows than a micro-batch is
    cut into parts, which become separate documents. A document with fewer than two ids has no row and is left out.

    Args:
        data: the pair.
        first: number of the first document.
        stop: number after the last document.
        max_rows: largest number of rows of a document, that of a micro-batch.
    """

    def __init__(self, data: IndexedDataset, first: int, stop: int, max_rows: int) -> None:
        self._data = data
        bounds = np.asarray(data.document_indices)[first : stop + 1]
        ends = np.concatenate([[0], np.cumsum(data.sequence_lengths, dtype=np.int64)])
        rows = np.maximum(np.diff(ends[bounds]) - 1, 0)
        parts = -(-rows // max_rows)
        document = np.repeat(np.arange(len(rows)), parts)
        # Number of each part in its document: 0, 1, ...
        part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        self._sequences = bounds
        self._document, self._start = document, part * max_rows
        self._rows = np.minimum(rows[document] - self._start, max_rows)

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, index: int) -> int:
        """See `Documents.rows`."""
        return int(self._rows[index])

    def read(self, index: int) -> np.ndarray:
        """See `Documents.read`."""
        document, start, rows = self._document[index], int(self._start[index]), int(self._rows[index])
        first, stop = int(self._sequences[document]), int(self._sequences[document + 1])
        if stop - first == 1:
            ids = self._data.get(first, offset=start, length=rows + 1)
        else:
            ids = np.concatenate([self._data.get(sequence) for sequence in range(first, stop)])[start:][: rows + 1]
        ids = ids.astype(np.int32)
        return np.stack([ids[:-1], ids[1:], np.ones(rows, np.int32)], axis=1)


def document_loaders(adapter: VarlenAdapter, args: Any) -> tuple[DocumentLoader | None, ...]:
    """Training, validation and test loaders of this rank; None for a split that the run does not read.

    Data-parallel replicas get the micro-batches in rotation, so an iteration reads the same documents for every number
    of replicas.

    Raises:
        VarlenError: a split that the run reads has no documents of two ids or more.
    """
    data = IndexedDataset(args.data_path[0], mmap=args.mmap_bin_files)
    bounds = split_bounds(args.split or "100,0,0", len(data.document_indices) - 1)
    is_read = (not args.skip_train, args.eval_iters > 0, args.eval_iters > 0)
    consumed = (args.consumed_train_samples, args.consumed_valid_samples, 0)
    loaders: list[DocumentLoader | None] = []
    for part, name in enumerate(_SPLITS):
        if not is_read[part]:
            loaders.append(None)
            continue
        documents = IndexedDocuments(data, bounds[part], bounds[part + 1], args.seq_length)
        if not len(documents):
            raise VarlenError(f"--split: {args.split}: leaves no documents of two ids or more for {name}")
        loaders.append(
            DocumentLoader(
                documents,
                adapter.loader_thread,
                adapter.plan,
                tokens=args.seq_length,
                seed=args.seed + part,
                first=consumed[part] + mpu.get_data_parallel_rank(),
                stride=mpu.get_data_parallel_world_size(),
                row_multiple=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            )
        )
    return tuple(loaders)


def split_bounds(split: str, count: int) -> list[int]:
    """Bounds of the splits of `count` documents, by weights such as `969,30,1`."""
    weights = [float(part) for part in split.split(",")]
    weights += [0.0] * (len(_SPLITS) - len(weights))
    ends = np.cumsum(weights) / sum(weights) * count
    return [0, *(round(float(end)) for end in ends)]
