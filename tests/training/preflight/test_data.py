"""Data that are missing, or cannot be what the flags say, are named before training."""

import json
from types import SimpleNamespace

import pytest
from support.number_tokenizer import NumberTokenizer

from megatron_switch.errors import ConfigError, DataError
from megatron_switch.training.preflight import data as data_module
from megatron_switch.training.preflight.data import (
    check_data,
    check_data_flags,
    check_pair_files,
    sentinels,
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mock_data": False}, r"nothing to train on: no --data-path .*prepare.*--mock-data"),
        ({"tokenizer_type": None}, r"no tokenizer: --tokenizer-type was not given"),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": "gone.model"},
            r"SentencePieceTokenizer reads a model file, and --tokenizer-model gone\.model is none",
        ),
        (
            {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": None},
            r"reads a model file, and none was given\. Give the file .*\(--tokenizer-model\)",
        ),
    ],
)
def test_missing_sources_are_named(sparse_line, changes, message):
    args = sparse_line().args
    args.mock_data = True
    for name, value in changes.items():
        setattr(args, name, value)
    with pytest.raises(DataError, match=message):
        check_data_flags(args)


@pytest.mark.parametrize(
    "flags",
    [
        "--data-path a",
        "--data-path a b",
        "--data-path 0.5 a 0 b",
        "--train-data-path 0.5 a 0.5 b --valid-data-path c",
        "--train-data-path a --eval-iters 0",
        "--data-path a --split 1",
        "--data-path a --split 100,0,0",
    ],
)
def test_data_may_be_named_in_several_ways(sparse_line, flags):
    args = sparse_line(flags).args
    if args.split:
        args.eval_iters = 0
    check_data_flags(args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--data-path a --split 0,50,50", r"nothing to train on: --split 0,50,50 .*--skip-train"),
        ("--valid-data-path a", r"nothing to train on: --valid-data-path .*Add --train-data-path"),
    ],
)
def test_data_of_which_none_is_for_training_are_refused(sparse_line, flags, message):
    args = sparse_line(f"{flags} --eval-iters 0").args
    with pytest.raises(DataError, match=message):
        check_data_flags(args)
    args.skip_train = True
    check_data_flags(args)


@pytest.mark.parametrize("words", ["0 a", "nan a 1 b", "-1 a 2 b", "1 a 2"])
def test_weights_that_cannot_be_blended_by_are_refused(sparse_line, words):
    args = sparse_line().args
    args.data_path = words.split()
    with pytest.raises(DataError, match=rf"--data-path takes prefixes, or .* Got: {words}\."):
        check_data_flags(args)


@pytest.mark.parametrize("split", ["abc", "0,0,0", "98,-1,1", "1,1,1,1", "nan,1,1", ""])
def test_a_split_that_is_none_is_refused(sparse_line, split):
    args = sparse_line("--data-path a").args
    args.split = split
    with pytest.raises(DataError, match=f"--split takes the weights .* got '{split}'"):
        check_data_flags(args)


@pytest.mark.parametrize(
    "flags",
    ["--data-path a --split 100,0,0", "--data-path a --split 90,0,10", "--train-data-path a"],
)
def test_evaluation_needs_data(sparse_line, flags):
    with pytest.raises(DataError, match="Nothing is left to evaluate on, but --eval-iters is 3"):
        check_data_flags(sparse_line(f"{flags} --eval-iters 3").args)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--full-validation", "Add --multiple-validation-sets to --full-validation"),
        (
            "--full-validation --multiple-validation-sets --test-data-path t",
            "cannot evaluate test data in a run with --multiple-validation-sets",
        ),
    ],
)
def test_validation_that_megatron_ends_at_is_refused(sparse_line, flags, message):
    with pytest.raises(ConfigError, match=message):
        check_data_flags(sparse_line(f"--mock-data {flags}").args)


def test_only_splits_that_are_read_need_documents(sparse_line, monkeypatch):
    monkeypatch.setattr(data_module, "get_tokenizer", lambda: type("T", (), {"vocab_size": 127}))
    facts = type("F", (), {"sequences": 35})
    monkeypatch.setattr(data_module, "check_indexed_dataset", lambda prefix, vocab_size: facts)
    args = sparse_line("--data-path a --split 98,1,1").args
    args.rank = 0
    check_data(args)  # with --eval-iters 0, from the fixture
    args.eval_iters = 1
    with pytest.raises(DataError, match=r"leaves none for test .*--eval-iters 0"):
        check_data(args)


def test_every_named_file_is_checked_once_by_the_first_rank(sparse_line, monkeypatch):
    seen = []
    monkeypatch.setattr(data_module, "get_tokenizer", lambda: type("T", (), {"vocab_size": 127}))
    monkeypatch.setattr(
        data_module, "check_indexed_dataset", lambda prefix, vocab_size: seen.append(prefix)
    )
    args = sparse_line("--train-data-path 0.3 a 0.7 b --valid-data-path c").args
    args.rank = 0
    check_data(args)
    args.rank = 1
    check_data(args)
    assert seen == ["a", "b", "c"]


@pytest.fixture
def pair_args(monkeypatch, tmp_path):
    """Arguments of a Switch-T5 whose training data are a file with the given lines."""

    def make(*lines, **changes):
        path = tmp_path / "pairs.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        values = {
            "data_path": None,
            "train_data_path": [str(path)],
            "valid_data_path": None,
            "test_data_path": None,
            "split": None,
            "seq_length": 4,
            "decoder_seq_length": 4,
            "mock_data": False,
        }
        return SimpleNamespace(**(values | changes))

    monkeypatch.setattr(data_module, "get_tokenizer", NumberTokenizer)
    return make


def test_a_split_without_pairs_is_refused(pair_args):
    args = pair_args(*[{"input": "5", "target": "7 8"}] * 10, split="98,1,1")
    args.data_path, args.train_data_path = args.train_data_path, None
    with pytest.raises(
        DataError, match=r"10 pairs, and --split 98,1,1 leaves none for valid.*test"
    ):
        check_pair_files(args)


def test_texts_that_will_be_cut_are_named_before_training(pair_args):
    args = pair_args({"input": "1 2 3 4", "target": "1"}, {"input": "1", "target": "2"})
    (note,) = check_pair_files(args)
    assert "1 of 2 inputs are longer than --seq-length 4" in note


def test_random_numbers_have_the_last_tokens_for_sentinels(pair_args):
    assert sentinels(pair_args()) == ()
    made = sentinels(pair_args(mock_data=True))
    assert made[:2] == (199, 198)
    assert NumberTokenizer.eod not in made
