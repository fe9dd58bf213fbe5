"""Defaults are shown once, and texts that argparse cannot format are shown as they are."""

from argparse import SUPPRESS, ArgumentParser

import pytest

from megatron_switch.utils.help_text import ShowingDefaults


def help_of(*names, **options):
    parser = ArgumentParser(prog="try", add_help=False, formatter_class=ShowingDefaults)
    parser.add_argument(*(names or ("--flag",)), **options)
    return " ".join(parser.format_help().split())


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ({"help": "a number", "default": 0.0}, "a number (0.0)"),
        ({"help": "A number.", "default": 3}, "A number. Default: 3."),
        ({"help": "A number. Default: the host's.", "default": 3}, "Default: the host's."),
        ({"help": "8 is a good default.", "default": 3}, "8 is a good default. Default: 3."),
        ({"help": "a number"}, "a number"),
        ({"help": "a number", "default": SUPPRESS}, "a number"),
        ({"help": "on or off", "action": "store_true"}, "on or off"),
        ({"help": "50% of it", "default": 3}, "50% of it (3)"),
        ({"help": "50%% of it", "default": 3}, "50% of it (3)"),
        ({"default": 3}, "--flag FLAG"),
    ],
)
def test_what_stands_at_a_flag(options, end):
    text = help_of(**options)
    assert text.endswith(end)
    assert text.count("(") == end.count("(")


def test_a_positional_shows_no_default():
    assert help_of("files", nargs="*", default=[], help="a file").endswith("a file")
