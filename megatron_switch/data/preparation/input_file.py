"""One input file: its format, how it is opened, and what is wrong with it.

The suffix decides: ``.txt .md .py .jsonl .parquet``, the first four also followed by ``.gz`` or
``.zst``. A file is checked when it is found, before any work starts: it must be readable, not
empty, and its first bytes must be UTF-8 text without NUL, or it must have a Parquet footer. Faults
further in are found when the file is read (:mod:`megatron_switch.data.preparation.documents`).
"""

import codecs
import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, cast

from backports import zstd

from megatron_switch.errors import ConfigError

Format = Literal["text", "jsonl", "parquet"]
Compression = Literal["none", "gzip", "zstd"]

_FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".md": "text",
    ".py": "text",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}

KNOWN_NAMES = f"{' '.join(_FORMATS)} (all but .parquet also with {' or '.join(_COMPRESSIONS)})"
"""Suffixes, for messages."""

READ_ERRORS = (OSError, EOFError, zlib.error, zstd.ZstdError)
"""What opening and reading a damaged or unreadable file can raise."""

_HEAD_BYTES = 8192
_TEXT_TYPES = ("string", "large_string", "string_view")


@dataclass(frozen=True)
class InputFile:
    """A file that holds documents.

    Attributes:
        path: Absolute path.
        format: What the bytes are once decompressed.
        compression: What they are wrapped in.
        size: Bytes on disk.
        modified_ns: Time of the last change, nanoseconds since 1970.
        optional: The file is left out when it is bad, even without ``--skip-bad-input``: it belongs
            to the standard library, where a few files are bad on purpose.
    """

    path: Path
    format: Format
    compression: Compression
    size: int
    modified_ns: int
    optional: bool = False

    @classmethod
    def at(cls, path: Path, *, optional: bool = False) -> "InputFile":
        """Describe the file at ``path``, whose suffix must be a known one.

        Raises:
            OSError: The file is missing or not accessible.
        """
        kind = name_kind(path)
        assert kind is not None, f"{path} has no known name"
        status = path.stat()
        return cls(path, kind[0], kind[1], status.st_size, status.st_mtime_ns, optional)

    def is_unchanged(self) -> bool:
        """Return whether the file on disk still is the one described here."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        return (status.st_size, status.st_mtime_ns) == (self.size, self.modified_ns)


def name_kind(path: Path) -> tuple[Format, Compression] | None:
    """Return format and compression by a file's suffix, None for an unknown one."""
    compression = _COMPRESSIONS.get(path.suffix.lower(), "none")
    inner = path if compression == "none" else path.with_suffix("")
    kind = _FORMATS.get(inner.suffix.lower())
    if kind is None or (kind == "parquet" and compression != "none"):
        return None
    return kind, compression


def open_bytes(file: InputFile) -> BinaryIO:
    """Open a text or jsonl file; what is read from it is decompressed.

    Raises:
        OSError: The file cannot be opened. Damage shows only while reading, as one of
            :data:`READ_ERRORS`.
    """
    assert file.format != "parquet", "a Parquet file is not a stream of text"
    if file.compression == "gzip":
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    if file.compression == "zstd":
        return cast(BinaryIO, zstd.open(file.path, "rb"))
    return file.path.open("rb")


def open_parquet(file: InputFile) -> Any:
    """Open a Parquet file with pyarrow.

    Returns:
        A ``pyarrow.parquet.ParquetFile``.

    Raises:
        ConfigError: pyarrow is not installed.
        OSError: The file cannot be read.
        ValueError: The file is not Parquet, or damaged.
    """
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(
            f"Reading Parquet needs the package pyarrow, and importing it failed ({error}); the "
            f"input has {file.path}. Install it with: pip install 'megatron-switch[hf]'."
        ) from error
    return parquet.ParquetFile(file.path)


def head_fault(file: InputFile, *, text_key: str) -> str:
    """Return what is wrong with the beginning of a file, "" when nothing is.

    Args:
        file: The file.
        text_key: Column that a Parquet file must have, ``--text-key``.

    Raises:
        ConfigError: The file is Parquet and pyarrow is not installed.
    """
    if file.size == 0:
        return "is empty"
    try:
        if file.format == "parquet":
            return _parquet_fault(file, text_key)
        with open_bytes(file) as stream:
            head = stream.read(_HEAD_BYTES)
    except READ_ERRORS as error:
        return f"cannot be read ({read_error_text(error)})"
    return "is empty" if not head else text_fault(head, final=len(head) < _HEAD_BYTES)


def text_fault(data: bytes, *, final: bool = True) -> str:
    """Return why bytes are not text, "" when they are.

    Args:
        data: Bytes from the beginning of a file, a line or a whole file.
        final: Whether ``data`` ends where a character must end; otherwise its last character
            may be cut.
    """
    if b"\0" in data:
        return "is not text: it holds NUL bytes"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(data, final)
    except UnicodeDecodeError as error:
        return f"is not UTF-8 text: byte {error.start} is {data[error.start]:#04x}"
    return ""


def read_error_text(error: Exception) -> str:
    """Return the text of a reading error, without the file's name, which messages have already."""
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__


def _parquet_fault(file: InputFile, text_key: str) -> str:
    try:
        with open_parquet(file) as parquet:
            schema = parquet.schema_arrow
            rows = parquet.metadata.num_rows
    except ConfigError:
        raise
    except ValueError as error:
        return f"is not a Parquet file ({error})"
    if text_key not in schema.names:
        return (
            f"has no column {text_key!r} (--text-key); its columns are "
            f"{', '.join(map(repr, schema.names)) or 'none'}"
        )
    column_type = str(schema.field(text_key).type)
    if not column_type.removeprefix("dictionary<values=").startswith(_TEXT_TYPES):
        return f"has {column_type} in column {text_key!r} (--text-key), and text is needed"
    return "" if rows else "is empty"
