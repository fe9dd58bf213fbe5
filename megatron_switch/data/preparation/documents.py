"""Reading documents: every input file becomes a stream of texts, and every text one document.

    .txt .md .py   one document a file, or one for every part between ``--document-separator``
    .jsonl         one document a line, the text at ``--text-key``; blank lines are skipped
    .parquet       one document a row, the text in column ``--text-key``

Texts are returned as they are in the file: line ends are kept, only a byte order mark at the
beginning is removed. Empty documents are counted and left out. Bad input is an error that names
file and line or, with ``--skip-bad-input``, is counted and left out too.

A file can be read in parts (:class:`FilePart`), so that several processes share it: a plain jsonl
file by ranges of bytes, a Parquet file by row groups. A line belongs to the part in which it
begins, so parts that join without a gap give the documents of the whole file, each once.
"""

import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_switch.data.preparation.corpus import SKIP_FLAG
from megatron_switch.data.preparation.input_file import (
    READ_ERRORS,
    InputFile,
    open_bytes,
    open_parquet,
    read_error_text,
    text_fault,
)
from megatron_switch.errors import DataError

MAX_DOCUMENT_BYTES = 128 * 2**20
"""Largest document that is tokenised; a tokenizer needs about 50 times its size in memory."""

_BLOCK_CHARACTERS = 2**20
_ROWS_PER_BATCH = 1024
_FAULTS_KEPT = 5


@dataclass(frozen=True)
class FilePart:
    """A piece of a file.

    Attributes:
        file: The file.
        start: First byte of a plain jsonl file, first row group of a Parquet file, otherwise 0.
        stop: End, exclusive, in the same unit. Files that cannot be divided end at 1.
        weight: Bytes of text in it, roughly.
    """

    file: InputFile
    start: int
    stop: int
    weight: int


@dataclass(frozen=True)
class ReadOptions:
    """How files are read: ``--text-key``, ``--document-separator``, ``--skip-bad-input``."""

    text_key: str = "text"
    separator: str | None = None
    skip_bad: bool = False


@dataclass
class LeftOut:
    """What was left out while reading.

    Attributes:
        empty: Documents without text.
        bad: Bad files, lines and rows.
        by_flag: Those of them that are an error without ``--skip-bad-input``.
        reasons: What was bad, for the first few.
    """

    empty: int = 0
    bad: int = 0
    by_flag: int = 0
    reasons: list[str] = field(default_factory=list)

    def add_bad(self, reason: str, *, by_flag: bool) -> None:
        """Count a bad file, line or row, and keep the reasons of the first few."""
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
    """A line, row or file that is no document; reading may continue behind it."""


def split_into_parts(file: InputFile, size: int) -> list[FilePart]:
    """Divide a file into parts of about ``size`` bytes, where its format allows it.

    Raises:
        ConfigError: The file is Parquet and pyarrow is not installed.
        OSError: A Parquet file cannot be read.
    """
    if file.format == "parquet":
        with open_parquet(file) as parquet:
            groups = range(parquet.num_row_groups)
            weights = [parquet.metadata.row_group(group).total_byte_size for group in groups]
        return [FilePart(file, group, group + 1, weights[group]) for group in groups]
    if file.compression != "none":
        return [FilePart(file, 0, 1, 4 * file.size)]  # text shrinks to about a quarter
    if file.format == "text":
        return [FilePart(file, 0, 1, file.size)]
    starts = range(0, file.size, size)
    stops = [*starts[1:], file.size]
    return [FilePart(file, *ends, ends[1] - ends[0]) for ends in zip(starts, stops, strict=True)]


def read_documents(part: FilePart, options: ReadOptions, left_out: LeftOut) -> Iterator[Document]:
    """Yield the documents of a part in their order.

    Args:
        part: Which piece of which file.
        options: What counts as a document, and whether bad ones may be left out.
        left_out: Counts what is left out.

    Raises:
        DataError: A file, line or row is bad and may not be left out; the message names it.
    """
    file = part.file
    try:
        for document in _documents(part, options, left_out):
            if len(document.text) > MAX_DOCUMENT_BYTES:
                fault = f"{document.place} is too large: {len(document.text):,} characters"
                _leave_out(fault, file, options, left_out)
            else:
                yield document
    except _BadPieceError as error:
        _leave_out(str(error), file, options, left_out)
    except READ_ERRORS as error:
        fault = f"{file.path} cannot be read to its end ({read_error_text(error)})"
        _leave_out(fault, file, options, left_out)


def _documents(part: FilePart, options: ReadOptions, left_out: LeftOut) -> Iterator[Document]:
    if part.file.format == "parquet":
        return _rows(part, options, left_out)
    if part.file.format == "jsonl":
        return _lines(part, options, left_out)
    if options.separator is None:
        return _whole(part.file, left_out)
    return _between_separators(part.file, options.separator)


def _leave_out(reason: str, file: InputFile, options: ReadOptions, left_out: LeftOut) -> None:
    if not options.skip_bad and not file.optional:
        raise DataError(f"{reason}. Fix or remove it, or give {SKIP_FLAG} to leave it out.")
    left_out.add_bad(reason, by_flag=not file.optional)


def _whole(file: InputFile, left_out: LeftOut) -> Iterator[Document]:
    """Yield a text file as one document."""
    with open_bytes(file) as stream:
        data = stream.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise _BadPieceError(
            f"{file.path} is one document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB, too "
            "large to tokenise at once: divide it with --document-separator"
        )
    if fault := text_fault(data):
        raise _BadPieceError(f"{file.path} {fault}")
    if text := data.decode("utf-8-sig"):
        yield Document(text, str(file.path))
    else:
        left_out.empty += 1


def _between_separators(file: InputFile, separator: str) -> Iterator[Document]:
    """Yield the parts of a text file between separators; empty parts are no documents."""
    number = 0
    with open_bytes(file) as stream:
        # newline="" keeps line ends as they are.
        text_stream = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        rest = ""
        while True:
            try:
                block = text_stream.read(_BLOCK_CHARACTERS)
            except UnicodeDecodeError as error:
                raise _BadPieceError(f"{file.path} is not UTF-8 text ({error.reason})") from error
            if "\0" in block:
                raise _BadPieceError(f"{file.path} is not text: it holds NUL bytes")
            # What stands behind the last separator may go on in the next block.
            *texts, rest = (rest + block).split(separator)
            for text in filter(None, texts if block else [*texts, rest]):
                number += 1
                yield Document(text, f"{file.path}, document {number}")
            if not block:
                return
            if len(rest) > MAX_DOCUMENT_BYTES:
                raise _BadPieceError(
                    f"{file.path} has more than {MAX_DOCUMENT_BYTES // 2**20} MiB without "
                    f"the --document-separator {separator!r}, too large to tokenise at once"
                )


def _lines(part: FilePart, options: ReadOptions, left_out: LeftOut) -> Iterator[Document]:
    """Yield the documents of the lines that begin in a part of a jsonl file."""
    file = part.file
    divided = file.compression == "none"
    with open_bytes(file) as stream:
        number = 0  # of the line, counted from where this part begins
        if part.start:
            stream.seek(part.start - 1)
            # One byte back: a line that begins exactly at ``start`` is read by this part, the rest
            # of one that began before it is not.
            stream.readline()
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
                    line.removeprefix(b"\xef\xbb\xbf") if first_line else line, options
                )
            except _BadPieceError as error:
                # Lines before this part are counted only where a message needs the number.
                place = f"{file.path}, line {_lines_before(file, part.start) + number:,}"
                _leave_out(f"{place}: {error}", file, options, left_out)
                continue
            if text:
                yield Document(text, f"{file.path}, line {number:,}{_from_byte(part.start)}")
            else:
                left_out.empty += 1


def _text_of_line(line: bytes, options: ReadOptions) -> str:
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
    if options.text_key not in record:
        keys = ", ".join(map(repr, record)) or "none"
        raise _BadPieceError(f"no key {options.text_key!r} (--text-key); the keys are {keys}")
    text = record[options.text_key]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise _BadPieceError(f"key {options.text_key!r} (--text-key) holds {kind}, not text")
    return _encodable(text)


def _rows(part: FilePart, options: ReadOptions, left_out: LeftOut) -> Iterator[Document]:
    """Yield the documents of a Parquet file's row groups."""
    file = part.file
    try:
        with open_parquet(file) as parquet:
            metadata = parquet.metadata
            row = sum(metadata.row_group(group).num_rows for group in range(part.start))
            batches = parquet.iter_batches(
                _ROWS_PER_BATCH, row_groups=range(part.start, part.stop), columns=[options.text_key]
            )
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    row += 1
                    place = f"{file.path}, row {row:,}"
                    if text is None:
                        reason = f"{place}: column {options.text_key!r} (--text-key) holds no text"
                        _leave_out(reason, file, options, left_out)
                    elif text:
                        yield Document(text, place)
                    else:
                        left_out.empty += 1
    except ValueError as error:  # what pyarrow raises for damaged pages
        raise _BadPieceError(f"{file.path} cannot be read to its end ({error})") from error


def _encodable(text: str) -> str:
    """Return the text; JSON can write halves of surrogate pairs, which no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadPieceError(f"the text holds half a surrogate pair at {error.start}") from error
    return text


def _lines_before(file: InputFile, stop: int) -> int:
    """Count the lines of a plain file that begin before byte ``stop``."""
    lines = 0
    with open_bytes(file) as stream:
        while stream.tell() < stop and stream.readline():
            lines += 1
    return lines


def _from_byte(start: int) -> str:
    return f" after byte {start:,}" if start else ""
