"""Flags and command lines turn into each other."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import (
    argv_of,
    attribute_of,
    flag_key,
    flag_name,
    flags_of_argv,
    split_train_flags,
)


@pytest.mark.parametrize("name", ["num_layers", "num-layers", "--num-layers", "--num_layers"])
def test_every_spelling_of_a_flag_has_one_name_and_one_attribute(name):
    assert flag_name(name) == "--num-layers"
    assert attribute_of(name) == "num_layers"
    assert flag_key(name) == "num-layers"


def test_flags_become_argv_without_those_that_are_off():
    flags = {"a": True, "b_c": False, "c": None, "d": 1.5, "e": "[0,1]", "--f": [1, "x"], "g": 0}
    assert argv_of(flags) == [*["--a", "--d", "1.5", "--e", "[0,1]", "--f", "1", "x", "--g", "0"]]


def test_argv_becomes_flags():
    argv = ["--a", "1", "--b", "--c=x", "--d", "1", "2", "3", "--e", "-1"]
    expected = {"a": "1", "b": True, "c": "x", "d": ["1", "2", "3"], "e": "-1"}
    assert flags_of_argv(argv) == expected
    assert flags_of_argv(argv_of(expected)) == expected


def test_argv_begins_with_a_flag():
    with pytest.raises(ConfigError, match=r"begin with two dashes, but 'train' comes first"):
        flags_of_argv(["train", "--a"])


@pytest.mark.parametrize(
    ("argv", "own", "flags"),
    [
        (["--nodes", "2"], ["--nodes", "2"], []),
        (["--nodes", "2", "--", "--lr", "1"], ["--nodes", "2"], ["--lr", "1"]),
        (["--", "--a", "--", "b"], [], ["--a", "--", "b"]),
    ],
)
def test_the_flags_of_a_training_stand_after_the_first_dashes(argv, own, flags):
    assert split_train_flags(argv) == (own, flags)
