"""A range holds the numbers between its bounds, and says in words which they are."""

import math

import pytest

from megatron_switch.flags.traits import Range


@pytest.mark.parametrize(
    ("allowed", "inside", "outside", "words"),
    [
        (Range(at_least=1), (1, 1.5), (0, 0.99), "at least 1"),
        (Range(above=0), (1e-9,), (0, -1), "above 0"),
        (Range(at_least=0, below=1), (0, 0.99), (1, -0.01), "at least 0 and below 1"),
        (Range(at_least=0, at_most=2**40), (2**40,), (2**40 + 1,), "at least 0 and at most 2^40"),
        (Range(other_than=0), (-1, 1), (0, -0.0), "other than 0"),
    ],
    ids=str,
)
def test_bounds_belong_to_a_range_or_not_as_its_words_say(allowed, inside, outside, words):
    assert all(number in allowed for number in inside)
    assert not any(number in allowed for number in (*outside, math.nan, math.inf, -math.inf))
    assert str(allowed) == words


def test_only_numbers_are_checked_and_each_of_a_list():
    share = Range(at_least=0, at_most=1, why="It is a share.")
    for value in (None, True, "2", [0.5, 1], 0):
        assert share.problem("--share", value) == ""
    expected = "--share must be at least 0 and at most 1, got 2. It is a share."
    assert share.problem("--share", [0.5, 2]) == expected
