"""Shards depend on the input alone, can be found again, and join to what one process would make."""

import dataclasses

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megatron_switch.data.preparation import token_shards
from megatron_switch.data.preparation.corpus import find_corpus
from megatron_switch.data.preparation.documents import ReadOptions
from megatron_switch.data.preparation.input_file import InputFile
from megatron_switch.data.preparation.token_shards import ShardWriter, plan_shards, sample_texts
from megatron_switch.data.tokenizer import Tokenizer
from megatron_switch.errors import DataError


class Characters:
    """Stands for a tokenizer of Megatron's: one token a character, with the value of its code."""

    def tokenize(self, text):
        if "unknown" in text:
            raise KeyError("unknown word")
        return [ord(character) for character in text if character != "~"]


@pytest.fixture
def writer(tmp_path):
    (tmp_path / "work").mkdir()
    return ShardWriter(tmp_path / "work", Tokenizer(Characters(), 128, 10), ReadOptions())


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(token_shards, "_LEAST_WEIGHT", 100)


def plan(root):
    return plan_shards(find_corpus([root]).files)


def test_the_plan_keeps_order_and_balance(tmp_path, small_shards):
    for index, size in enumerate([60, 30, 30, 250, 10, 10]):
        (tmp_path / f"{index}.txt").write_text("x" * size)
    (tmp_path / "9.jsonl").write_text('{"text": "123456789"}\n' * 10)  # 220 bytes
    shards = plan(tmp_path)
    names = [[part.file.path.name for part in shard.parts] for shard in shards]
    assert names == [
        ["0.txt", "1.txt"],
        ["2.txt"],
        ["3.txt"],
        ["4.txt", "5.txt"],
        ["9.jsonl"],
        ["9.jsonl"],
        ["9.jsonl"],
    ]
    assert [(part.start, part.stop) for shard in shards[4:] for part in shard.parts] == [
        (0, 100),
        (100, 200),
        (200, 220),
    ]
    assert [shard.index for shard in shards] == list(range(7))
    assert sum(shard.weight for shard in shards) == 390 + 220


def test_many_small_files_share_a_shard(tmp_path):
    for index in range(20):
        (tmp_path / f"{index}.txt").write_text("x" * 100)
    assert len(plan(tmp_path)) == 1


def test_a_document_ends_with_exactly_one_end(tmp_path, writer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "ab"}\n{"text": "cd\\n"}\n{"text": "~"}\n{"text": ""}\n')
    (shard,) = plan_shards([InputFile.at(path)])
    record = writer.write(shard)
    assert (record.documents, record.tokens, record.text_bytes, record.empty) == (2, 6, 5, 2)
    dataset = IndexedDataset(str(writer.folder / "shard-000000"))
    assert [ids.tolist() for ids in dataset] == [[97, 98, 10], [99, 100, 10]]
    assert dataset.document_indices.tolist() == [0, 1, 2]


def test_joined_shards_are_the_whole(folder, writer, small_shards):
    (folder / "b" / "c.md").write_text("only ascii")
    (folder / "b" / "d.py").write_text("code")
    shards = plan(folder)
    assert len(shards) > 1
    for shard in reversed(shards):
        writer.write(shard)
    dataset = IndexedDataset(str(writer.join([shard.index for shard in shards])))
    texts = ["".join(map(chr, ids[:-1])) for ids in dataset]
    assert texts == [(folder / "a.txt").read_text().removesuffix("\n"), "only ascii", "code"]


def test_tokens_take_the_smallest_type(writer):
    assert writer.itemsize == 2
    large = dataclasses.replace(writer, tokenizer=Tokenizer(Characters(), 100_000, 10))
    assert (large.dtype, large.itemsize) == (np.int32, 4)


def test_a_finished_shard_is_found_again_only_while_it_is_whole(folder, writer):
    (folder / "b" / "c.md").write_text("only ascii")
    (folder / "b" / "d.py").write_text("code")
    (shard,) = plan(folder)
    assert writer.finished(0) is None
    record = writer.write(shard)
    assert writer.finished(0) == record
    assert sorted(path.suffix for path in writer.folder.iterdir()) == [".bin", ".idx", ".json"]
    tokens = writer.folder / "shard-000000.bin"
    tokens.write_bytes(tokens.read_bytes()[:-1])
    assert writer.finished(0) is None
    writer.write(shard)
    (writer.folder / "shard-000000.idx").unlink()
    assert writer.finished(0) is None
    writer.write(shard)
    (writer.folder / "shard-000000.json").write_text('{"index": 0')
    assert writer.finished(0) is None


def test_a_shard_with_losses_counts_only_while_losses_are_allowed(tmp_path, writer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\nbad\n')
    (shard,) = plan_shards([InputFile.at(path)])
    lenient = dataclasses.replace(writer, options=ReadOptions(skip_bad=True))
    record = lenient.write(shard)
    assert record.bad == 1
    assert "line 2" in record.reasons[0]
    assert lenient.finished(0) == record
    assert writer.finished(0) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("unknown", r"a\.txt: the tokenizer cannot take this text \('unknown word'\)\. Remove it"),
        ("é", r"a\.txt: token 233 is outside the tokenizer's vocabulary of 128 tokens\. Raise"),
    ],
)
def test_text_that_the_tokenizer_cannot_take(tmp_path, writer, text, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        writer.write(plan_shards([InputFile.at(tmp_path / "a.txt")])[0])
    assert writer.finished(0) is None


def test_a_corpus_that_fits_is_sampled_whole(folder):
    shards = plan(folder)
    files = [folder / name for name in ("a.txt", "b/c.md", "b/d.py")]
    texts = [path.read_bytes().decode() for path in files]
    assert list(sample_texts(shards, 10**6, ReadOptions())) == texts


def test_a_larger_corpus_is_sampled_from_everywhere(tmp_path, small_shards, monkeypatch):
    monkeypatch.setattr(token_shards, "_SHARDS_WANTED", 4)
    for index in range(8):
        (tmp_path / f"{index}.txt").write_text(str(index) * 100)
    shards = plan(tmp_path)
    assert len(shards) == 4
    assert list(sample_texts(shards, 40, ReadOptions())) == ["0" * 10, "2" * 10, "4" * 10, "6" * 10]
    assert sum(map(len, sample_texts(shards, 500, ReadOptions()))) == 500
