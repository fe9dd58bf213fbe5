"""Values of flags are in their range, or argparse names it."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from megatron_switch.utils.argument_types import (
    count,
    not_negative,
    output_file,
    path,
    tokens,
)


def test_a_count_is_a_whole_number_of_some_size():
    assert count("1") == 1
    assert count("1048576") == 2**20
    for text in ("0", "-1", "1.5", "many", "1048577"):
        with pytest.raises(ArgumentTypeError, match=f"from 1 to 1048576, got '{text}'"):
            count(text)


def test_a_number_is_finite_and_not_negative():
    assert not_negative("0") == 0
    assert not_negative("1e-3") == 1e-3
    for text in ("-1", "nan", "inf", "many"):
        with pytest.raises(ArgumentTypeError, match=f"takes a number, 0 or more, got '{text}'"):
            not_negative(text)


def test_an_empty_word_is_no_path():
    assert path("a b") == Path("a b")
    with pytest.raises(ArgumentTypeError, match="takes a path, got an empty word"):
        path("")


@pytest.mark.parametrize(
    ("text", "number"),
    [("7", 7), ("300e9", 300 * 10**9), ("300B", 300 * 10**9), ("1.5T", 1500 * 10**9)],
)
def test_tokens_have_units(text, number):
    assert tokens(text) == number


@pytest.mark.parametrize("text", ["", "0", "-1", "many", "B", "1X", "inf", "nan"])
def test_what_is_no_number_of_tokens_is_refused(text):
    with pytest.raises(ArgumentTypeError, match="takes a number of tokens, such as 300e9 or 300B"):
        tokens(text)


def test_an_output_file_needs_a_folder(tmp_path):
    assert output_file(str(tmp_path / "file")) == tmp_path / "file"
    with pytest.raises(ArgumentTypeError, match=r"takes a file, and .* is a folder"):
        output_file(str(tmp_path))
    with pytest.raises(ArgumentTypeError, match=r"is in the folder '.*gone', which does not exist"):
        output_file(str(tmp_path / "gone" / "file"))
