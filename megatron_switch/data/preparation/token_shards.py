"""Shards: parts of a corpus that are tokenised independently, by any process, in any order.

The division depends on the input files alone, never on the number of processes, so the result is
the same bytes for every ``--workers``. A shard is written under temporary names, its record last: a
shard with a record is finished, and is not made again.
"""

import gc
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from megatron_switch.data.preparation.documents import (
    Document,
    FilePart,
    LeftOut,
    ReadOptions,
    read_documents,
    split_into_parts,
)
from megatron_switch.data.preparation.input_file import InputFile
from megatron_switch.data.tokenizer import Tokenizer, upstream_warnings_hidden
from megatron_switch.errors import DataError
from megatron_switch.utils.atomic_file import renamed_into_place

_SHARDS_WANTED = 512  # enough for any number of processes, few enough to join quickly
_LEAST_WEIGHT = 2**20
_MOST_WEIGHT = 2**28


@dataclass(frozen=True)
class Shard:
    """Parts of files that are tokenised together.

    Attributes:
        index: Place among the shards of the corpus, from 0.
        parts: In the order of their documents.
        weight: Bytes of text in it, roughly.
    """

    index: int
    parts: tuple[FilePart, ...]
    weight: int


@dataclass(frozen=True)
class ShardRecord:
    """What a finished shard holds; saved as JSON beside it.

    Attributes:
        index: Place among the shards.
        documents: Number of documents.
        tokens: Number of tokens, one end-of-document token a document included.
        text_bytes: Size of the texts in UTF-8.
        empty: Documents without text that were left out.
        bad: Bad files, lines and rows that were left out.
        by_flag: Those of them that are an error without ``--skip-bad-input``.
        reasons: Why, for the first few of them.
    """

    index: int
    documents: int
    tokens: int
    text_bytes: int
    empty: int
    bad: int
    by_flag: int
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class ShardWriter:
    """Tokenises shards into a folder.

    Attributes:
        folder: Where shards go.
        tokenizer: What turns text into tokens.
        options: How files are read.
    """

    folder: Path
    tokenizer: Tokenizer
    options: ReadOptions

    @property
    def dtype(self) -> type[np.number]:
        """Smallest type that holds every token, chosen as Megatron does."""
        from megatron.core.datasets.indexed_dataset import DType

        chosen: type[np.number] = DType.optimal_dtype(self.tokenizer.vocab_size)
        return chosen

    @property
    def itemsize(self) -> int:
        """Bytes of a token on disk."""
        return np.dtype(self.dtype).itemsize

    def write(self, shard: Shard) -> ShardRecord:
        """Tokenise a shard and put it into the folder.

        Raises:
            DataError: The input is bad, or has text that the tokenizer cannot take.
            OSError: The folder cannot be written.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        final = {suffix: self._path(shard.index, suffix) for suffix in (".bin", ".idx")}
        temporary = {suffix: path.with_suffix(f"{suffix}.tmp") for suffix, path in final.items()}
        builder = IndexedDatasetBuilder(str(temporary[".bin"]), dtype=self.dtype)
        left_out = LeftOut()
        documents = tokens = text_bytes = 0
        for document in self._documents(shard, left_out):
            ids = self._encode(document)
            if not ids.size:
                left_out.empty += 1
                continue
            builder.add_document(ids, [ids.size])
            documents += 1
            tokens += ids.size
            text_bytes += len(document.text.encode("utf-8"))
        builder.finalize(str(temporary[".idx"]))
        for suffix, path in final.items():
            temporary[suffix].replace(path)
        record = ShardRecord(
            shard.index,
            documents,
            tokens,
            text_bytes,
            left_out.empty,
            left_out.bad,
            left_out.by_flag,
            tuple(left_out.reasons),
        )
        with renamed_into_place(self._path(shard.index, ".json")) as stream:
            json.dump(asdict(record), stream)
        return record

    def finished(self, index: int) -> ShardRecord | None:
        """Return the record of a shard that is in the folder, None when it must be made.

        A shard from which bad input was left out counts only with ``--skip-bad-input``.
        """
        try:
            fields = json.loads(self._path(index, ".json").read_text(encoding="utf-8"))
            record = ShardRecord(**fields)
            size = self._path(index, ".bin").stat().st_size
        except (FileNotFoundError, ValueError, TypeError):
            return None
        whole = size == record.tokens * self.itemsize
        return (
            replace(record, reasons=tuple(record.reasons))
            if whole
            and self._path(index, ".idx").exists()
            and (self.options.skip_bad or not record.by_flag)
            else None
        )

    def join(self, indices: Sequence[int]) -> Path:
        """Concatenate finished shards.

        Args:
            indices: Shards with at least one document, in the order of the result.

        Returns:
            Path of the result without its suffix: ``corpus`` in the folder of the shards.

        Raises:
            OSError: The folder cannot be written.
        """
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        prefix = self.folder / "corpus"
        builder = IndexedDatasetBuilder(str(prefix.with_suffix(".bin")), dtype=self.dtype)
        # Megatron collects garbage after every index, which takes longer than the copying unless
        # the objects of its imports are frozen.
        gc.freeze()
        try:
            with upstream_warnings_hidden():
                for index in indices:
                    builder.add_index(str(self.folder / f"shard-{index:06d}"))
        finally:
            gc.unfreeze()
        builder.finalize(str(prefix.with_suffix(".idx")))
        return prefix

    def _path(self, index: int, suffix: str) -> Path:
        return self.folder / f"shard-{index:06d}{suffix}"

    def _documents(self, shard: Shard, left_out: LeftOut) -> Iterator[Document]:
        for part in shard.parts:
            yield from read_documents(part, self.options, left_out)

    def _encode(self, document: Document) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        """Return a document's tokens with one end-of-document token behind, empty for no tokens."""
        vocab_size, eod = self.tokenizer.vocab_size, self.tokenizer.eod
        try:
            ids = list(self.tokenizer.built.tokenize(document.text))
        except Exception as error:  # each library has its own; all mean the same to a user
            raise DataError(
                f"{document.place}: the tokenizer cannot take this text "
                f"({str(error) or type(error).__name__}). Remove it, or choose another "
                "--tokenizer-type."
            ) from error
        if ids and ids[-1] != eod:  # some tokenizers append it themselves
            ids.append(eod)
        ids_T = np.asarray(ids, dtype=np.int64)
        if ids and not (ids_T.min() >= 0 and ids_T.max() < vocab_size):
            wrong = int(ids_T.max() if ids_T.max() >= vocab_size else ids_T.min())
            raise DataError(
                f"{document.place}: token {wrong} is outside the tokenizer's vocabulary of "
                f"{vocab_size} tokens. Raise --vocab-size, or choose a tokenizer whose files "
                "belong together."
            )
        return ids_T


def plan_shards(files: Sequence[InputFile]) -> list[Shard]:
    """Divide files into shards of nearly equal weight, in the order of their documents.

    Raises:
        ConfigError: A file is Parquet and pyarrow is not installed.
        OSError: A Parquet file cannot be read.
    """
    total = sum(file.size for file in files)
    wanted = min(max(total // _SHARDS_WANTED, _LEAST_WEIGHT), _MOST_WEIGHT)
    shards: list[Shard] = []
    parts: list[FilePart] = []
    weight = 0
    for file in files:
        for part in split_into_parts(file, wanted):
            # Parts are never reordered, so a shard may stay far below the wanted weight.
            if parts and weight + part.weight > wanted:
                shards.append(Shard(len(shards), tuple(parts), weight))
                parts, weight = [], 0
            parts.append(part)
            weight += part.weight
    return [*shards, Shard(len(shards), tuple(parts), weight)]


def sample_texts(shards: Sequence[Shard], num_bytes: int, options: ReadOptions) -> Iterator[str]:
    """Yield text from all over a corpus, without reading much more than is yielded.

    A corpus that fits is yielded whole. Of a larger one, evenly spaced shards give equal shares,
    each from its beginning.

    Raises:
        DataError: The input is bad and may not be left out.
    """
    fits = sum(shard.weight for shard in shards) <= num_bytes
    chosen = shards if fits else shards[:: -(-len(shards) // _SHARDS_WANTED)]
    share = num_bytes if fits else -(-num_bytes // len(chosen))
    for shard in chosen:
        left = share
        for part in shard.parts:
            for document in read_documents(part, options, LeftOut()):
                yield document.text[:left]
                left -= len(document.text)
                if left <= 0:
                    break
            if left <= 0:
                break


def available_workers() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
