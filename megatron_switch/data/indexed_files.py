"""Checks of Megatron's indexed token files, before training opens them.

Megatron maps the files and trusts them: a truncated one shows as an assertion without a name, as
wrong text, or as an embedding look-up out of range on some rank after hours. These checks read the
index, and of the tokens a sample, and name the file and the fault. Files must be on a local or
mounted disk.

An index holds, little-endian: 9 bytes of magic, version (u64), token type (u8), number of sequences
(u64) and of document marks (u64); then per sequence its length (i32) and its byte offset (i64), the
marks (i64, the first 0, the last the number of sequences), and in multimodal files a mode (i8) per
sequence.
"""

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron_switch.errors import DataError

_MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_TYPES: dict[int, type[np.number]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_WINDOWS = 256
_WINDOW_TOKENS = 4096


@dataclass(frozen=True)
class IndexedFacts:
    """What a pair of ``.bin`` and ``.idx`` files holds.

    Attributes:
        sequences: Number of sequences.
        tokens: Number of tokens.
        dtype: Type of a token on disk.
    """

    sequences: int
    tokens: int
    dtype: "np.dtype[np.number]"


def check_indexed_dataset(prefix: str | Path, *, vocab_size: int | None = None) -> IndexedFacts:
    """Check that a prefix names two whole files that fit each other and the vocabulary.

    Args:
        prefix: Path without ``.bin`` and ``.idx``, as in ``--data-path``.
        vocab_size: Number of tokens that training knows. A sample of the tokens must be below it.

    Raises:
        DataError: A file is missing, truncated, damaged or of another vocabulary.
    """
    index_path, token_path = _paths(str(prefix))
    facts = _check_index(index_path)
    expected = facts.tokens * facts.dtype.itemsize
    size = token_path.stat().st_size
    if size != expected:
        state = "truncated" if size < expected else "not the file of this index"
        raise DataError(
            f"{token_path} is {state}: it has {size:,} bytes, and {index_path.name} lists "
            f"{facts.tokens:,} tokens in {expected:,} bytes. Copy both files again, or prepare "
            "the data again."
        )
    if vocab_size is not None:
        _check_tokens(token_path, facts, vocab_size)
    return facts


def _paths(prefix: str) -> tuple[Path, Path]:
    """Return the paths of index and tokens, which both exist."""
    index_path, token_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [path for path in (index_path, token_path) if not path.is_file()]
    if not missing:
        return index_path, token_path
    hint = "Prepare the data with megatron-switch prepare, or correct --data-path."
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            hint = f"Give --data-path without the suffix: {prefix.removesuffix(suffix)}."
    if (Path(prefix) / "corpus.idx").is_file():
        hint = f"Give --data-path the files in that folder: {Path(prefix) / 'corpus'}."
    names = " and ".join(map(str, missing))
    absent = "which is not there" if len(missing) == 1 else "which are not there"
    raise DataError(f"Data path {prefix} needs {names}, {absent}. {hint}")


def _check_index(path: Path) -> IndexedFacts:
    size = path.stat().st_size
    with path.open("rb") as stream:
        header = stream.read(_HEADER.size)
    if not header.startswith(_MAGIC):
        raise DataError(
            f"{path} is no index of Megatron's: it begins with {header[:9]!r} and should begin "
            f"with {_MAGIC!r}. Correct --data-path, or prepare the data again."
        )
    if len(header) < _HEADER.size:
        raise _damaged(path, f"it ends after {size} bytes, inside its header")
    _, version, code, sequences, marks = _HEADER.unpack(header)
    if version != 1 or code not in _TOKEN_TYPES:
        raise _damaged(path, f"version {version} with token type {code} is not known")
    # With and without a mode per sequence: that is not in the header, only the size shows it.
    sizes = [_HEADER.size + (12 + mode) * sequences + 8 * marks for mode in (0, 1)]
    if size not in sizes:
        state = "truncated" if size < sizes[0] else "too long"
        raise _damaged(path, f"it is {state}: {size:,} bytes for {sequences:,} sequences", sizes[0])
    if sequences == 0:
        raise DataError(f"{path} lists no sequence: there is nothing to train on.")
    index = np.memmap(path, mode="r")
    lengths = np.frombuffer(index, np.int32, sequences, _HEADER.size)
    offsets = np.frombuffer(index, np.int64, sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(index, np.int64, marks, _HEADER.size + 12 * sequences)
    dtype: np.dtype[np.number] = np.dtype(_TOKEN_TYPES[code])
    tokens = int(lengths.sum(dtype=np.int64))
    if tokens == 0:
        raise DataError(f"{path} lists only empty sequences: there is nothing to train on.")
    # Offsets of the first and the last sequence show a shift anywhere between them.
    last = (tokens - int(lengths[-1])) * dtype.itemsize
    if lengths.min() < 0 or offsets[0] != 0 or offsets[-1] != last:
        raise _damaged(path, "lengths and offsets of its sequences do not agree")
    if marks == 0 or documents[0] != 0 or documents[-1] != sequences:
        raise _damaged(path, "its documents do not end with its sequences")
    return IndexedFacts(sequences, tokens, dtype)


def _check_tokens(path: Path, facts: IndexedFacts, vocab_size: int) -> None:
    """Check evenly spaced windows of tokens, the first and the last included."""
    tokens_T = np.memmap(path, dtype=facts.dtype, mode="r")
    last_start = max(facts.tokens - _WINDOW_TOKENS, 0)
    for start in np.unique(np.linspace(0, last_start, _WINDOWS).astype(np.int64)):
        window_T = tokens_T[start : start + _WINDOW_TOKENS]
        wrong_T = np.flatnonzero((window_T < 0) | (window_T >= vocab_size))
        if wrong_T.size:
            place = int(start + wrong_T[0])
            raise DataError(
                f"{path} holds token {tokens_T[place]} at position {place:,}, and the tokenizer "
                f"has only {vocab_size:,} tokens: the data was prepared with another one. Give the "
                "--tokenizer-type and --tokenizer-model it was prepared with (prepared.json beside "
                "the data has them)."
            )


def _damaged(path: Path, what: str, expected: int | None = None) -> DataError:
    should = f", and should have {expected:,}" if expected is not None else ""
    return DataError(
        f"{path} is damaged: {what}{should}. Copy the file again, or prepare the data again."
    )
