"""Pairs of texts: what is read, what is refused, in which order, and what is cut."""

import json

import numpy as np
import pytest

from megatron_switch.data.encoder_decoder import SpecialTokens
from megatron_switch.data.text_to_text import (
    Pair,
    PairFiles,
    TextToText,
    check_pairs,
    count_cut,
    split_numbers,
)
from megatron_switch.errors import DataError


class Letters:
    """A token for each letter: its place in the alphabet, from 2."""

    def tokenize(self, text):
        return [ord(letter) - ord("a") + 2 for letter in text]


def write(path, pairs):
    lines = [json.dumps({"input": source, "target": target}) for source, target in pairs]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def two_files(tmp_path):
    first = write(tmp_path / "a.jsonl", [("ab", "x"), ("cd", "y")])
    second = tmp_path / "b.jsonl"
    second.write_text('\n{"target": "é", "input": "日本", "more": 1}\n\n', encoding="utf-8")
    return [first, second]


def test_pairs_are_numbered_through_all_files_and_blank_lines_are_none(two_files):
    pairs = PairFiles(two_files)
    assert [pairs[number] for number in range(len(pairs))] == [
        Pair("ab", "x"),
        Pair("cd", "y"),
        Pair("日本", "é"),
    ]
    assert [check_pairs(path) for path in two_files] == [2, 1]


BAD = {
    '{"input": "a"}': r"has no 'target'; its keys are \['input'\]",
    '{"input": "a", "target": 3}': r"'target' is no string but int",
    '["a", "b"]': r"is a JSON list, not an object",
    '{"input": "a", "target": "b"': r"is not JSON",
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_refused_with_file_and_line(line, tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text(f'{{"input": "a", "target": "b"}}\n\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=rf"1 of 2 lines .*\n.*pairs\.jsonl, line 3: {BAD[line]}"):
        check_pairs(path)


def test_bytes_that_are_no_text_are_refused(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(b'{"input": "\xff", "target": "b"}\n')
    with pytest.raises(DataError, match=r"pairs\.jsonl, line 1: is not UTF-8"):
        check_pairs(path)


def test_the_first_few_of_many_bad_lines_are_shown(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("{}\n" * 10, encoding="utf-8")
    with pytest.raises(DataError, match=r"(?s)10 of 10 lines.*line 1:.*line 3:.*and 7 more") as got:
        check_pairs(path)
    assert "line 4:" not in str(got.value)


def test_files_that_cannot_be_read_line_by_line_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read .*--train-data-path"):
        PairFiles([tmp_path / "none.jsonl"])
    packed = tmp_path / "packed.jsonl"
    packed.write_bytes(b"\x1f\x8b rest")
    with pytest.raises(DataError, match=r"packed\.jsonl is compressed.*gunzip"):
        check_pairs(packed)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n\n")
    with pytest.raises(DataError, match=r"empty\.jsonl holds no line"):
        check_pairs(empty)


def dataset(path, numbers=None, num_samples=None, **changes):
    pairs = PairFiles([path])
    settings = {"source_length": 4, "target_length": 3, "seed": 1, "split": 0} | changes
    return TextToText(
        pairs,
        np.arange(len(pairs)) if numbers is None else numbers,
        num_samples,
        tokenizer=Letters(),
        special=SpecialTokens(end=1, padding=0),
        **settings,
    )


def test_texts_that_fit_end_with_the_end_token(tmp_path):
    sample = dataset(write(tmp_path / "p.jsonl", [("ab", "c")]))[0]
    assert sample["encoder_tokens"].tolist() == [2, 3, 1, 0]
    assert sample["labels"].tolist() == [4, 1, 0]
    assert sample["decoder_tokens"].tolist() == [0, 4, 1]
    assert sample["loss_mask"].tolist() == [1, 1, 0]


def test_a_cut_source_still_ends_and_a_cut_target_does_not(tmp_path):
    sample = dataset(write(tmp_path / "p.jsonl", [("abcdef", "cdef")]))[0]
    assert sample["encoder_tokens"].tolist() == [2, 3, 4, 1]
    assert sample["labels"].tolist() == [4, 5, 6]
    assert sample["loss_mask"].tolist() == [1, 1, 1]


def test_empty_texts_are_an_end_token(tmp_path):
    sample = dataset(write(tmp_path / "p.jsonl", [("", "")]))[0]
    assert sample["encoder_tokens"].tolist() == [1, 0, 0, 0]
    assert sample["labels"].tolist() == [1, 0, 0]


def test_what_is_cut_is_counted_on_each_side(tmp_path):
    path = write(tmp_path / "p.jsonl", [("abc", "ab"), ("abcd", "abcdef"), ("abcdefg", "a")])
    notes = count_cut(path, Letters(), source_length=4, target_length=3)
    assert len(notes) == 2
    assert "2 of 3 inputs are longer than --seq-length 4 tokens" in notes[0]
    assert "(the longest has 8)" in notes[0]
    assert "1 of 3 targets are longer than --decoder-seq-length 3 tokens" in notes[1]
    assert count_cut(path, Letters(), source_length=8, target_length=7) == ()


class Numbers:
    """Reads numbers, as Megatron's NullTokenizer does."""

    def tokenize(self, text):
        return [int(word) for word in text.split()]


def test_a_text_that_the_tokenizer_cannot_read_is_told_with_its_line(tmp_path):
    path = write(tmp_path / "p.jsonl", [("1 2", "3"), ("copy: 4", "5")])
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: .*'copy:'.* need --tokenizer-type"):
        count_cut(path, Numbers(), source_length=4, target_length=3)


def sources(data):
    return [data[index]["encoder_tokens"][0].item() - 2 for index in range(len(data))]


def test_every_epoch_has_every_pair_once_in_an_order_of_its_own(tmp_path):
    path = write(tmp_path / "p.jsonl", [(letter, "x") for letter in "abcdefghij"])
    order = sources(dataset(path, num_samples=25))
    epochs = [order[:10], order[10:20]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    assert set(order[20:]) < set(range(10))
    # The same again, whatever was read before; another with another seed or split.
    data = dataset(path, num_samples=25)
    assert [data[index]["encoder_tokens"][0].item() - 2 for index in (24, 3, 17)] == [
        order[24],
        order[3],
        order[17],
    ]
    others = [sources(dataset(path, **change)) for change in ({"seed": 2}, {"split": 1})]
    assert epochs[0] not in others
    assert len(dataset(path)) == 10


def test_splits_are_disjoint_parts_of_a_shuffled_whole():
    parts = split_numbers(100, [80, 15, 5], seed=4)
    assert [len(part) for part in parts] == [80, 15, 5]
    assert sorted(np.concatenate(parts)) == list(range(100))
    assert parts[2].tolist() != list(range(95, 100))
    again = split_numbers(100, [80, 15, 5], seed=4)
    assert all((one == other).all() for one, other in zip(parts, again, strict=True))


def test_the_sample_of_none_has_no_loss(tmp_path):
    assert dataset(write(tmp_path / "p.jsonl", [("ab", "c")]))[None]["loss_mask"].sum() == 0
