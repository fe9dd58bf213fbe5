"""Whole files pass; a missing, truncated, damaged or foreign one is named with what is wrong."""

import struct

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

from megatron_switch.data import indexed_files
from megatron_switch.data.indexed_files import check_indexed_dataset
from megatron_switch.errors import DataError

LENGTHS = [5, 1, 30, 4]
HEADER_BYTES = 34


def build(prefix, *, dtype=np.uint16, lengths=LENGTHS, first=0, multimodal=False):
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype, multimodal=multimodal)
    for length in lengths:
        builder.add_item(torch.arange(first, first + length))
        builder.end_document()
    builder.finalize(f"{prefix}.idx")
    return prefix


@pytest.fixture
def prefix(tmp_path):
    return build(tmp_path / "corpus")


def change(path, edit):
    path.write_bytes(edit(path.read_bytes()))


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("multimodal", [False, True])
def test_whole_files_pass(tmp_path, dtype, multimodal):
    prefix = build(tmp_path / "corpus", dtype=dtype, multimodal=multimodal)
    facts = check_indexed_dataset(str(prefix), vocab_size=30)
    assert (facts.sequences, facts.tokens, facts.dtype) == (4, 40, np.dtype(dtype))


def test_token_types_are_megatrons():
    assert {
        code: DType.dtype_from_code(code) for code in indexed_files._TOKEN_TYPES
    } == indexed_files._TOKEN_TYPES
    assert len(DType) == len(indexed_files._TOKEN_TYPES)


@pytest.mark.parametrize(
    ("name", "missing", "hint"),
    [
        ("gone", r"gone\.idx and .*gone\.bin", "Prepare the data with megatron-switch prepare"),
        ("corpus.bin", r"corpus\.bin\.idx and", r"without the suffix: .*/corpus\."),
        ("", r"\.idx and", r"the files in that folder: .*/corpus\."),
    ],
)
def test_missing_files_are_named_with_a_hint(tmp_path, prefix, name, missing, hint):
    with pytest.raises(DataError, match=rf"needs .*{missing}.* not there\. .*{hint}"):
        check_indexed_dataset(tmp_path / name)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_one_missing_file_is_named(prefix, suffix):
    prefix.with_suffix(suffix).unlink()
    with pytest.raises(DataError, match=rf"needs \S*corpus\{suffix}, which is not there"):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: data[:-2], r"corpus\.bin is truncated: it has 78 bytes, .* 40 tokens in 80"),
        (lambda data: b"", r"corpus\.bin is truncated: it has 0 bytes"),
        (lambda data: data + b"x", r"corpus\.bin is not the file of this index: it has 81 bytes"),
    ],
)
def test_tokens_that_do_not_fit_the_index(prefix, edit, message):
    change(prefix.with_suffix(".bin"), edit)
    with pytest.raises(DataError, match=message):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda data: b"", r"is no index of Megatron's: it begins with b''"),
        (lambda data: b"{" + data, r"is no index of Megatron's: it begins with b'\{MMIDIDX"),
        (lambda data: data[:20], "damaged: it ends after 20 bytes, inside its header"),
        (lambda data: data[:9] + struct.pack("<Q", 2) + data[17:], "version 2 with token type 8"),
        (lambda data: data[:17] + b"\x63" + data[18:], "version 1 with token type 99 is not known"),
        (
            lambda data: data[:-8],
            r"it is truncated: 114 bytes for 4 sequences, and should have 122",
        ),
        (lambda data: data + b"12345", "it is too long: 127 bytes for 4 sequences"),
        (
            lambda data: data[:34] + struct.pack("<i", -5) + data[38:],
            "lengths and offsets .* agree",
        ),
        (lambda data: data[:74] + struct.pack("<q", 3) + data[82:], "lengths and offsets .* agree"),
        (lambda data: data[:-8] + struct.pack("<q", 3), "documents do not end with its sequences"),
    ],
)
def test_a_damaged_index(prefix, edit, message):
    change(prefix.with_suffix(".idx"), edit)
    with pytest.raises(DataError, match=rf"corpus\.idx .*{message}"):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([], "lists no sequence: there is nothing"), ([0, 0], "lists only empty sequences")],
)
def test_nothing_to_train_on(tmp_path, lengths, message):
    prefix = build(tmp_path / "corpus", lengths=lengths)
    with pytest.raises(DataError, match=message):
        check_indexed_dataset(prefix)


@pytest.mark.parametrize("position", [0, 17, 39])
def test_a_token_outside_the_vocabulary(prefix, position):
    tokens = np.fromfile(prefix.with_suffix(".bin"), np.uint16)
    tokens[position] = 300
    tokens.tofile(prefix.with_suffix(".bin"))
    check_indexed_dataset(prefix, vocab_size=301)
    with pytest.raises(
        DataError, match=rf"holds token 300 at position {position}, .* only 300 tokens.*--tokenizer"
    ):
        check_indexed_dataset(prefix, vocab_size=300)


def test_a_negative_token(tmp_path):
    prefix = build(tmp_path / "corpus", dtype=np.int32, first=-1)
    with pytest.raises(DataError, match="holds token -1 at position 0"):
        check_indexed_dataset(prefix, vocab_size=300)


def test_the_sample_reaches_from_end_to_end(tmp_path, monkeypatch):
    """Windows cover both ends and lie evenly; a foreign vocabulary shows in any of them."""
    monkeypatch.setattr(indexed_files, "_WINDOWS", 4)
    monkeypatch.setattr(indexed_files, "_WINDOW_TOKENS", 10)
    prefix = build(tmp_path / "corpus", lengths=[100])
    tokens = np.zeros(100, np.uint16)
    seen = []
    for position in range(100):
        changed = tokens.copy()
        changed[position] = 9
        changed.tofile(prefix.with_suffix(".bin"))
        try:
            check_indexed_dataset(prefix, vocab_size=9)
        except DataError:
            seen.append(position)
    assert seen == [*range(10), *range(30, 40), *range(60, 70), *range(90, 100)]
