"""Data named in list files are known before training as if they stood on the command line."""

import json

import pytest

from megatron_switch.errors import DataError
from megatron_switch.training.arguments.data_flags import data_entries
from megatron_switch.training.preflight.data import check_data_flags


def test_flags_and_files_give_the_same_words(sparse_line, tmp_path):
    words = tmp_path / "list.txt"
    words.write_text("0.3 a\n0.7 b\n")
    expected = {"data_path": ["0.3", "a", "0.7", "b"]}
    assert data_entries(sparse_line("--data-path 0.3 a 0.7 b").args) == expected
    assert data_entries(sparse_line(f"--data-args-path {words}").args) == expected


def test_splits_are_lists_texts_or_nothing(sparse_line, tmp_path):
    lists = tmp_path / "lists.json"
    lists.write_text(json.dumps({"train": ["0.5", "a", "0.5", "b"], "valid": "c d", "test": None}))
    assert data_entries(sparse_line(f"--per-split-data-args-path {lists}").args) == {
        "train_data_path": ["0.5", "a", "0.5", "b"],
        "valid_data_path": ["c", "d"],
    }


def test_no_data_are_no_words(sparse_line):
    assert data_entries(sparse_line("--mock-data").args) == {}


@pytest.mark.parametrize(
    ("flag", "content", "message"),
    [
        ("--data-args-path", None, r"--data-args-path .*list cannot be read: .*No such file"),
        ("--data-args-path", b"\xff\xfe", r"--data-args-path .*list cannot be read: 'utf-8' codec"),
        (
            "--data-args-path",
            b" \n",
            r"--data-args-path .*list is empty\. It holds what --data-path",
        ),
        ("--per-split-data-args-path", b"", r"is not a JSON object with train, valid and test"),
        ("--per-split-data-args-path", b"[1]", r"is not a JSON object with train, valid and test"),
        ("--per-split-data-args-path", b'{"train": "a"}', r"not a JSON object .*KeyError\('valid'"),
        (
            "--per-split-data-args-path",
            b'{"train": 3, "valid": null, "test": null}',
            r"has 3 for --train-data-path\. Give a list of texts",
        ),
    ],
)
def test_a_file_that_is_no_list_is_refused(sparse_line, tmp_path, flag, content, message):
    path = tmp_path / "list"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        data_entries(sparse_line(f"{flag} {path}").args)


def test_what_a_list_names_is_checked_like_a_flags_words(sparse_line, tmp_path):
    path = tmp_path / "list"
    path.write_text("1 a 2")
    with pytest.raises(DataError, match=r"--data-path takes prefixes, or .* Got: 1 a 2\."):
        check_data_flags(sparse_line(f"--data-args-path {path}").args)
    path.write_text('{"train": null, "valid": "a", "test": null}')
    with pytest.raises(DataError, match="nothing to train on: --valid-data-path"):
        check_data_flags(sparse_line(f"--per-split-data-args-path {path}").args)
