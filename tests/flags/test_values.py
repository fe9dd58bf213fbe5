"""Flags have typed values whether they are words of a command line or numbers of a model file."""

import pytest

from megatron_switch.errors import ConfigError
from megatron_switch.flags.values import FlagValues


@pytest.mark.parametrize("given", ["8", 8])
def test_words_and_numbers_are_the_same(given):
    values = FlagValues({"num-layers": given})
    assert values.integer("num-layers") == 8
    assert values.number("num-layers") == 8.0
    assert values.text("num-layers") == "8"


def test_a_flag_without_a_value_is_on():
    values = FlagValues({"bf16": True, "fp16": False, "swiglu": None})
    assert values.on("bf16")
    assert not any(map(values.on, ("fp16", "swiglu", "absent")))


@pytest.mark.parametrize("given", ["wide", "-1", "0", True, "1.5", ["1", "2"]])
def test_a_size_is_a_whole_number(given):
    with pytest.raises(ConfigError, match=r"^--hidden-size takes a whole number, 1 or more, got"):
        FlagValues({"hidden-size": given}).integer("hidden-size")


@pytest.mark.parametrize("given", ["wide", "nan", "inf", True])
def test_a_number_is_finite(given):
    with pytest.raises(ConfigError, match=r"^--lr takes a finite number, got"):
        FlagValues({"lr": given}).number("lr")


def test_a_size_that_is_needed_is_named():
    with pytest.raises(ConfigError, match=r"model's size needs --hidden-size, a whole number"):
        FlagValues({"hidden-size": None}).integer("hidden-size")
