"""Every expert flag of the installed Megatron has a row, and every row is about a flag."""

import re
from argparse import Action, ArgumentParser

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_switch.flags.argv import attribute_of
from megatron_switch.flags.known_flags import shown_flag
from megatron_switch.flags.megatron_flags import MEGATRON_FLAGS
from megatron_switch.flags.train_flags import flag_names

FAMILY = ("moe", "expert", "router", "routing")
"""A flag of Megatron is one for mixtures of experts when one of these is part of its name."""
DERIVED = {"padded_vocab_size", "virtual_pipeline_model_parallel_size"}
"""Attributes that Megatron derives from flags."""
CLASSIFIED = [name for name, row in MEGATRON_FLAGS.items() if row.reason]


@pytest.fixture(scope="module")
def upstream() -> dict[str, Action]:
    parser = add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    return {action.dest: action for action in parser._actions}


def test_every_expert_flag_of_megatron_is_classified(upstream):
    family = {
        attribute_of(flag)
        for action in upstream.values()
        for flag in action.option_strings
        if any(part in flag for part in FAMILY)
    }
    assert family - set(CLASSIFIED) == set(), "give these flags a row in megatron_flags.py"


def test_every_row_is_of_an_attribute_that_megatron_has(upstream):
    assert set(MEGATRON_FLAGS) - set(upstream) - DERIVED == set()


@pytest.mark.parametrize("name", MEGATRON_FLAGS)
def test_messages_name_a_flag_that_exists(name):
    row = MEGATRON_FLAGS[name]
    in_messages = row.range or row.reason or row.identity or row.on_resume != "free"
    flag = re.search(r"--([a-z0-9-]+)", shown_flag(name))[1]
    assert flag in flag_names() or not in_messages


@pytest.mark.parametrize("name", CLASSIFIED)
def test_what_is_refused_is_off_and_what_is_fixed_is_possible(name, upstream):
    row, action = MEGATRON_FLAGS[name], upstream[name]
    if row.kind == "refused":  # what is refused must be off unless somebody asks for it
        assert action.default == row.accepted[0]
    if row.kind == "fixed" and action.choices is not None:
        assert row.accepted[0] in action.choices
