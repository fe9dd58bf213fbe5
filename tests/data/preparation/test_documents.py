"""Every format gives its texts unchanged, whole or in parts, and says where it is bad."""

import gzip
import json

import pyarrow
import pytest
from backports import zstd
from pyarrow import parquet

from megatron_switch.data.preparation import documents
from megatron_switch.data.preparation.documents import (
    FilePart,
    LeftOut,
    ReadOptions,
    read_documents,
    split_into_parts,
)
from megatron_switch.data.preparation.input_file import InputFile
from megatron_switch.errors import DataError

TEXTS = ["one\r\ntwo\n", "  three ", "\u2028 vier \u0085 fünf", "六" * 50, "\ttab\n\n"]


def written(path, texts):
    """Write texts in the format that the path's name promises, and return the path."""
    lines = "".join(json.dumps({"text": text, "id": 7}) + "\n" for text in texts).encode()
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.table({"id": [0] * len(texts), "text": texts}), path, 2)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines))
    elif path.suffix == ".zst":
        path.write_bytes(zstd.compress(lines))
    else:
        path.write_bytes(lines)
    return path


def read(path, options=None, *, part_size=2**20):
    left_out = LeftOut()
    parts = split_into_parts(InputFile.at(path), part_size)
    options = options or ReadOptions()
    found = [doc for part in parts for doc in read_documents(part, options, left_out)]
    return found, left_out


def texts_of(path, options=None, **how):
    return [document.text for document in read(path, options, **how)[0]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_collections_give_every_text(tmp_path, name):
    path = written(tmp_path / name, [*TEXTS[:2], "", *TEXTS[2:]])
    found, left_out = read(path)
    assert [document.text for document in found] == TEXTS
    assert left_out == LeftOut(empty=1)
    place = "row 4" if name == "a.parquet" else "line 4"
    assert found[2].place == f"{path}, {place}"


@pytest.mark.parametrize("name", ["a.txt", "a.md.gz", "a.py.zst"])
def test_a_text_file_is_one_document(tmp_path, name):
    path = tmp_path / name
    data = "".join(TEXTS).encode()
    compress = {".gz": gzip.compress, ".zst": zstd.compress}.get(path.suffix, bytes)
    path.write_bytes(compress(data))
    assert texts_of(path) == ["".join(TEXTS)]


def test_a_byte_order_mark_is_no_text(tmp_path):
    for name in ("a.txt", "b.jsonl", "empty.txt"):
        content = {"a.txt": "text", "b.jsonl": '{"text": "text"}', "empty.txt": ""}[name]
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert texts_of(tmp_path / "a.txt") == ["text"]
    assert texts_of(tmp_path / "a.txt", ReadOptions(separator="|")) == ["text"]
    assert texts_of(tmp_path / "b.jsonl") == ["text"]
    assert read(tmp_path / "empty.txt") == ([], LeftOut(empty=1))


@pytest.mark.parametrize("part_size", [1, 7, 40, 100, 10_000])
def test_parts_of_a_jsonl_file_join_without_gap_or_double(tmp_path, part_size):
    texts = [f"text {number} " + "ä" * (number % 13) for number in range(60)]
    path = written(tmp_path / "a.jsonl", texts)
    assert texts_of(path, part_size=part_size) == texts
    path.write_bytes(path.read_bytes().rstrip(b"\n"))  # the last line may lack its end
    assert texts_of(path, part_size=part_size) == texts


def test_parts_of_a_parquet_file_are_its_row_groups(tmp_path):
    path = written(tmp_path / "a.parquet", TEXTS)
    parts = split_into_parts(InputFile.at(path), 1)
    assert len(parts) == 3
    last = list(read_documents(parts[-1], ReadOptions(), LeftOut()))
    assert [(document.text, document.place) for document in last] == [(TEXTS[4], f"{path}, row 5")]


@pytest.mark.parametrize("block", [1, 3, 1000])
def test_a_separator_cuts_text_wherever_it_falls(tmp_path, monkeypatch, block):
    monkeypatch.setattr(documents, "_BLOCK_CHARACTERS", block)
    path = tmp_path / "a.txt"
    path.write_bytes("<|end|>first\r\n<|end|><|end|>zweites ä<|end|>third<|en".encode())
    expected = ["first\r\n", "zweites ä", "third<|en"]
    assert texts_of(path, ReadOptions(separator="<|end|>")) == expected


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": "cut', r"the line is not JSON \(Unterminated string"),
        ('{"body": "a", "id": 1}', r"no key 'text' \(--text-key\); the keys are 'body', 'id'"),
        ("{}", "no key 'text' .* the keys are none"),
        ('["text"]', "the line holds list, not an object with keys"),
        ('{"text": 3}', r"key 'text' \(--text-key\) holds int, not text"),
        ('{"text": null}', "holds NoneType, not text"),
        (r'{"text": "\ud800"}', "half a surrogate pair at 0"),
        ("[" * 10_000, r"the line is (nested too deeply|not JSON)"),
        (b'{"text": "\xff"}', "the line is not UTF-8 text: byte 10 is 0xff"),
        (b'{"text": "\0"}', "the line is not text: it holds NUL bytes"),
    ],
)
@pytest.mark.parametrize("part_size", [16, 10_000])
def test_a_bad_line_is_named_or_left_out(tmp_path, line, complaint, part_size):
    path = tmp_path / "a.jsonl"
    good = b'{"text": "good"}\n'
    data = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(good + b"\n" + data + b"\n" + good)
    with pytest.raises(DataError, match=rf"a\.jsonl, line 3: .*{complaint}.*--skip-bad-input"):
        read(path, part_size=part_size)
    found, left_out = read(path, ReadOptions(skip_bad=True), part_size=part_size)
    assert [document.text for document in found] == ["good", "good"]
    assert left_out.bad == 1
    assert "line 3" in left_out.reasons[0]


def test_a_row_without_text_is_named_or_left_out(tmp_path):
    path = written(tmp_path / "a.parquet", ["a", "b", "c", None, "e"])
    with pytest.raises(DataError, match=r"a\.parquet, row 4: column 'text' .* holds no text"):
        read(path)
    found, left_out = read(path, ReadOptions(skip_bad=True))
    assert [document.text for document in found] == ["a", "b", "c", "e"]
    assert left_out.bad == 1


@pytest.mark.parametrize(
    ("content", "options", "complaint"),
    [
        (b"x" * 9000 + b"\0", ReadOptions(), "is not text: it holds NUL bytes"),
        (b"x" * 9000 + b"\xff", ReadOptions(), "is not UTF-8 text: byte 9000 is 0xff"),
        (b"x" * 9000 + b"\0", ReadOptions(separator="|"), "is not text: it holds NUL bytes"),
        (b"x" * 9000 + b"\xff", ReadOptions(separator="|"), "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_bad_further_in(tmp_path, content, options, complaint):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.txt {complaint}"):
        read(path, options)
    found, left_out = read(path, ReadOptions(separator=options.separator, skip_bad=True))
    assert found == []
    assert left_out.bad == 1


def test_a_bad_file_of_the_library_is_left_out_without_asking(tmp_path):
    path = tmp_path / "a.py"
    path.write_bytes(b"x" * 9000 + b"\xff")
    left_out = LeftOut()
    part = FilePart(InputFile.at(path, optional=True), 0, 1, 1)
    assert list(read_documents(part, ReadOptions(), left_out)) == []
    assert (left_out.bad, left_out.by_flag) == (1, 0)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_truncated_archive_gives_what_it_has_only_when_asked(tmp_path, name):
    texts = [f"{number:x}" * 40 for number in range(2000)]
    path = written(tmp_path / name, texts)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"cannot be read to its end \(Compressed file ended"):
        read(path)
    found, left_out = read(path, ReadOptions(skip_bad=True))
    assert 0 < len(found) < 2000
    assert left_out.bad == 1


def test_a_damaged_parquet_page_is_named(tmp_path):
    path = written(tmp_path / "a.parquet", ["some text"] * 1000)
    data = bytearray(path.read_bytes())
    data[4:200] = bytes(196)
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read to its end"):
        read(path)


def test_a_file_that_vanished_is_named(tmp_path):
    path = written(tmp_path / "a.jsonl", TEXTS)
    parts = split_into_parts(InputFile.at(path), 100)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read .*No such file"):
        list(read_documents(parts[0], ReadOptions(), LeftOut()))


@pytest.mark.parametrize(
    ("name", "options", "complaint"),
    [
        ("a.txt", ReadOptions(), "is one document of more than .* --document-separator"),
        ("a.txt", ReadOptions(separator="|"), r"without the --document-separator '\|', too large"),
        ("a.jsonl", ReadOptions(), r"line 2 is too large: 5,000 characters"),
    ],
)
def test_too_large_a_document_is_refused(tmp_path, monkeypatch, name, options, complaint):
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 3000)
    path = tmp_path / name
    if name == "a.jsonl":
        written(path, ["small", "x" * 5000])
    else:
        path.write_text("x" * 5000)
    with pytest.raises(DataError, match=complaint):
        read(path, options)


def test_reasons_are_kept_for_the_first_few_only():
    left_out = LeftOut()
    for number in range(9):
        left_out.add_bad(str(number), by_flag=number % 2 == 0)
    assert (left_out.bad, left_out.by_flag) == (9, 5)
    assert left_out.reasons == ["0", "1", "2", "3", "4"]
