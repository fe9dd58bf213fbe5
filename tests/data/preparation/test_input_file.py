"""A file is what its name says, and is looked at before any work starts."""

import gzip
import sys
from pathlib import Path

import pytest
from backports import zstd

from megatron_switch.data.preparation.input_file import InputFile, head_fault, name_kind, open_bytes
from megatron_switch.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", ("text", "none")),
        ("a.b.MD", ("text", "none")),
        ("a.py.gz", ("text", "gzip")),
        ("a.jsonl", ("jsonl", "none")),
        ("a.jsonl.zst", ("jsonl", "zstd")),
        ("a.parquet", ("parquet", "none")),
        ("a.parquet.gz", None),
        ("a.gz", None),
        ("a.json", None),
        ("txt", None),
    ],
)
def test_names_say_format_and_compression(name, kind):
    assert name_kind(Path(name)) == kind


@pytest.mark.parametrize("opener", [open, gzip.open, zstd.open])
def test_what_is_read_is_decompressed(tmp_path, opener):
    suffix = {open: "", gzip.open: ".gz", zstd.open: ".zst"}[opener]
    path = tmp_path / f"a.txt{suffix}"
    with opener(path, "wb") as stream:
        stream.write("später\n".encode() * 5000)
    source = InputFile.at(path)
    assert head_fault(source, text_key="text") == ""
    with open_bytes(source) as stream:
        assert stream.read() == "später\n".encode() * 5000


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("a.txt", b"", "is empty"),
        ("a.txt.gz", gzip.compress(b"", mtime=0), "is empty"),
        ("a.txt", b"text\0text", "is not text: it holds NUL bytes"),
        ("a.txt", "Grüße".encode("latin-1"), "is not UTF-8 text: byte 2 is 0xfc"),
        ("a.txt", "text".encode("utf-16"), "NUL bytes"),
        ("a.txt", b"cut at its end: \xc3", "is not UTF-8 text"),
        ("a.txt.gz", b"no gzip at all", "cannot be read (Not a gzipped file"),
        (
            "a.txt.gz",
            gzip.compress(b"text" * 99, mtime=0)[:-9],
            "cannot be read (Compressed file ended",
        ),
        ("a.txt.zst", b"no zstd at all", "cannot be read (Unable to decompress"),
        ("a.txt.zst", zstd.compress(b"text" * 99)[:-9], "cannot be read (Compressed file ended"),
        ("a.parquet", b"no parquet at all", "is not a Parquet file"),
    ],
)
def test_faults_at_the_beginning_are_named(tmp_path, name, content, fault):
    path = tmp_path / name
    path.write_bytes(content)
    assert fault in head_fault(InputFile.at(path), text_key="text")


def test_a_character_cut_by_the_end_of_the_look_is_no_fault(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("x" + "ä" * 8192)  # two bytes each, so byte 8192 is in the middle of one
    assert head_fault(InputFile.at(path), text_key="text") == ""


def test_missing_permission_is_a_fault(tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = InputFile.at(path)

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert head_fault(source, text_key="text") == "cannot be read (Permission denied)"


@pytest.mark.parametrize(
    ("columns", "fault"),
    [
        ({"text": ["a"]}, ""),
        ({"text": []}, "column 'text' (--text-key), and text is needed"),  # of type null
        (
            {"body": ["a"], "id": [1]},
            "no column 'text' (--text-key); its columns are 'body', 'id'",
        ),
        ({"text": [1]}, "has int64 in column 'text' (--text-key), and text is needed"),
    ],
)
def test_parquet_needs_its_text_column(tmp_path, columns, fault):
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table(columns), path)
    found = head_fault(InputFile.at(path), text_key="text")
    assert fault in found if fault else found == ""


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"package pyarrow.*a\.parquet.*'megatron-switch\[hf\]'"):
        head_fault(InputFile.at(path), text_key="text")


def test_a_changed_file_is_noticed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    source = InputFile.at(path)
    assert source.is_unchanged()
    path.write_text("other text")
    assert not source.is_unchanged()
    path.unlink()
    assert not source.is_unchanged()
