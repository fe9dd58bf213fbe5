"""Reading documents: every input file becomes a stream of texts, and every text one document.

    .txt .md .py   one document a file, or one for every part between ``--document-separator``
    .jsonl         one document a line, the text at ``--text-key``; blank lines are passed over
    .parquet       one document a row, the text in column ``--text-key``

Texts come out as they are in the file: line ends are kept, only a byte order mark at the very
beginning goes. What holds no text at all is counted and left out. What is bad stops the work with
file and line, or, where that was asked for, is counted and left out too.

A file can be read in parts (:class:`Part`), so that several processes share it: a plain jsonl file
by ranges of bytes, a Parquet file by row groups. A line belongs to the part in which it begins, so
parts that join without a gap give the documents of the whole file, each once.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_switch.data.corpus import SKIP_FLAG
from megatron_switch.data.sources import (
    READ_ERRORS,
    SourceFile,
    open_bytes,
    open_parquet,
    read_error_text,
    text_fault,
)
from megatron_switch.errors import DataError

MAX_DOCUMENT_BYTES = 128 * 2**20
"""Largest document that is tokenised; a tokenizer needs about 50 times that in memory."""

_BLOCK_CHARACTERS = 2**20
_ROWS_PER_BATCH = 1024
_FAULTS_KEPT = 5


@dataclass(frozen=True)
class Part:
    """A piece of a file.

    Attributes:
        source: The file.
        start: First byte of a plain jsonl file, first row group of a Parquet file, otherwise 0.
        stop: End, exclusive, in the same unit. Files that cannot be divided end at 1.
        weight: Bytes of text in it, roughly.
    """

    source: SourceFile
    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class Reading:
    """How files are read: ``--text-key``, ``--document-separator``, ``--skip-bad-input``."""

    text_key: str = "text"
    separator: str | None = None
    skip_bad: bool = False


@dataclass
class Losses:
    """What was left out while reading.

    Attributes:
        empty: Documents without text.
        bad: Bad pieces of input.
        by_flag: Those of them that only ``--skip-bad-input`` lets pass.
        reasons: What was bad, for the first few.
    """

    empty: int = 0
    bad: int = 0
    by_flag: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_bad(self, reason: str, *, by_flag: bool) -> None:
        """Count a bad piece of input and remember why, while there is room."""
        self.bad += 1
        self.by_flag += by_flag
        if len(self.reasons) < _FAULTS_KEPT:
            self.reasons.append(reason)


@dataclass(frozen=True)
class Document:
    """One text.

    Attributes:
        text: Its characters, never empty.
        place: Where it came from, for messages: the file, and the line or row in it.
    """

    text: str
    place: str


class _BadPieceError(Exception):
    """A line, row or file that is no document; reading may go on behind it."""


def split_into_parts(source: SourceFile, size: int) -> list[Part]:
    """Divide a file into parts of about ``size`` bytes, where its format allows it.

    Raises:
        ConfigError: The file is Parquet and pyarrow is not installed.
        OSError: A Parquet file cannot be read.
    """
    if source.format == "parquet":
        with open_parquet(source) as parquet:
            groups = range(parquet.num_row_groups)
            weights = [parquet.metadata.row_group(group).total_byte_size for group in groups]
        return [Part(source, group, group + 1, weights[group]) for group in groups]
    if source.compression != "none":
        return [Part(source, 0, 1, 4 * source.size)]  # text shrinks to about a quarter
    if source.format == "text":
        return [Part(source, 0, 1, source.size)]
    starts = range(0, source.size, size)
    stops = [*starts[1:], source.size]
    return [Part(source, *ends, ends[1] - ends[0]) for ends in zip(starts, stops, strict=True)]


def read_documents(part: Part, how: Reading, losses: Losses) -> Iterator[Document]:
    """Yield the documents of a part in their order.

    Args:
        part: Which piece of which file.
        how: What counts as a document, and whether bad ones may be left out.
        losses: Counts what is left out.

    Raises:
        DataError: A piece of input is bad and may not be left out; the message names it.
    """
    source = part.source
    try:
        for document in _documents(part, how, losses):
            if len(document.text) > MAX_DOCUMENT_BYTES:
                fault = f"{document.place} is too large: {len(document.text):,} characters"
                _leave_out(fault, source, how, losses)
            else:
                yield document
    except _BadPieceError as error:
        _leave_out(str(error), source, how, losses)
    except READ_ERRORS as error:
        fault = f"{source.path} cannot be read to its end ({read_error_text(error)})"
        _leave_out(fault, source, how, losses)


def _documents(part: Part, how: Reading, losses: Losses) -> Iterator[Document]:
    if part.source.format == "parquet":
        return _rows(part, how, losses)
    if part.source.format == "jsonl":
        return _lines(part, how, losses)
    if how.separator is None:
        return _whole(part.source, losses)
    return _between_separators(part.source, how.separator)


def _leave_out(reason: str, source: SourceFile, how: Reading, losses: Losses) -> None:
    if not how.skip_bad and not source.optional:
        raise DataError(f"{reason}. Mend or remove it, or give {SKIP_FLAG} to go on without it.")
    losses.add_bad(reason, by_flag=not source.optional)


def _whole(source: SourceFile, losses: Losses) -> Iterator[Document]:
    """Yield a text file as one document."""
    with open_bytes(source) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _BadPieceError(
            f"{source.path} is one document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB, too "
            "large to tokenise at once: divide it with --document-separator"
        )
    if fault := text_fault(data):
        raise _BadPieceError(f"{source.path} {fault}")
    if text := data.decode("utf-8-sig"):
        yield Document(text, str(source.path))
    else:
        losses.empty += 1


def _between_separators(source: SourceFile, separator: str) -> Iterator[Document]:
    """Yield the parts of a text file between separators; empty parts are no documents."""
    number = 0
    with open_bytes(source) as stream:
        # newline="" keeps line ends as they are.
        text_stream = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rest = ""
        while True:
            try:
                block = text_stream.read(_BLOCK_CHARACTERS)
            except UnicodeDecodeError as error:
                raise _BadPieceError(f"{source.path} is not UTF-8 text ({error.reason})") from error
            if "\0" in block:
                raise _BadPieceError(f"{source.path} is not text: it holds NUL bytes")
            *texts, rest = (rest + block).split(separator)
            for text in filter(None, texts if block else [*texts, rest]):
                number += 1
                yield Document(text, f"{source.path}, document {number}")
            if not block:
                return
            if len(rest) > MAX_DOCUMENT_BYTES:
                raise _BadPieceError(
                    f"{source.path} has more than {MAX_DOCUMENT_BYTES // 2**20} MiB without "
                    f"the --document-separator {separator!r}, too large to tokenise at once"
                )


def _lines(part: Part, how: Reading, losses: Losses) -> Iterator[Document]:
    """Yield the documents of the lines that begin in a part of a jsonl file."""
    source = part.source
    divided = source.compression == "none"
    with open_bytes(source) as stream:
        number = 0  # of the line, counted from where this part begins
        if part.start:
            stream.seek(part.start - 1)
            stream.readline()  # begins in the part before this one
        while not divided or stream.tell() < part.stop:
            line = stream.readline()
            if not line:
                return
            number += 1
            first_line = number == 1 and part.start == 0
            if not line.strip():
                continue
            try:
                text = _text_of_line(
                    line.removeprefix(b"\xef\xbb\xbf") if first_line else line, how
                )
            except _BadPieceError as error:
                # Counting the lines before this part is work for a failure, not for every line.
                place = f"{source.path}, line {_lines_before(source, part.start) + number:,}"
                _leave_out(f"{place}: {error}", source, how, losses)
                continue
            if text:
                yield Document(text, f"{source.path}, line {number:,}{_from_byte(part.start)}")
            else:
                losses.empty += 1


def _text_of_line(line: bytes, how: Reading) -> str:
    line = line.rstrip(b"\r\n")
    if fault := text_fault(line):
        raise _BadPieceError(f"the line {fault}")
    try:
        record = json.loads(line)
    except ValueError as error:
        raise _BadPieceError(f"the line is not JSON ({error})") from error
    except RecursionError as error:
        raise _BadPieceError("the line is nested too deeply to be a document") from error
    if not isinstance(record, dict):
        raise _BadPieceError(f"the line holds {type(record).__name__}, not an object with keys")
    if how.text_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise _BadPieceError(f"there is no key {how.text_key!r} (--text-key); the keys are {keys}")
    text = record[how.text_key]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise _BadPieceError(f"key {how.text_key!r} (--text-key) holds {kind}, and text is needed")
    return _encodable(text)


def _rows(part: Part, how: Reading, losses: Losses) -> Iterator[Document]:
    """Yield the documents of a Parquet file's row groups."""
    source = part.source
    try:
        with open_parquet(source) as parquet:
            metadata = parquet.metadata
            row = sum(metadata.row_group(group).num_rows for group in range(part.start))
            batches = parquet.iter_batches(
                _ROWS_PER_BATCH, row_groups=range(part.start, part.stop), columns=[how.text_key]
            )
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = f"{source.path}, row {row:,}"
                    if text is None:
                        reason = f"{place}: column {how.text_key!r} (--text-key) holds no text"
                        _leave_out(reason, source, how, losses)
                    elif text:
                        yield Document(text, place)
                    else:
                        losses.empty += 1
    except ValueError as error:  # what pyarrow raises for damaged pages
        raise _BadPieceError(f"{source.path} cannot be read to its end ({error})") from error


def _encodable(text: str) -> str:
    """Return the text; JSON can write halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadPieceError(f"the text holds half a surrogate pair at {error.start}") from error
    return text


def _lines_before(source: SourceFile, stop: int) -> int:
    """Count the lines of a plain file that begin before byte ``stop``."""
    lines = 0
    with open_bytes(source) as stream:
        while stream.tell() < stop and stream.readline():
            lines += 1
    return lines


def _from_byte(start: int) -> str:
    return f" after byte {start:,}" if start else ""
