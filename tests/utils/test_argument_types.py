"""Values of flags are in their range, or argparse names it."""

from argparse import ArgumentTypeError
from pathlib import Path

import pytest

from megatron_switch.utils.argument_types import count, not_negative, path


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
