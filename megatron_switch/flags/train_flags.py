"""All flags of ``megatron-switch train``, known without importing Megatron, which takes seconds.

A help text must not wait for Megatron, and a planner on a login node, or a script that is rendered
there, must not take a misspelt flag for one that has nothing to do with sizes. The flags stand in
``train_flags.json`` as arguments of argparse, with their defaults here and without Megatron's help
texts. ``tools/make_flags_doc.py`` writes it, and a test compares it with the parser that trains.
"""

import difflib
import json
from argparse import _ActionsContainer
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megatron_switch.errors import ConfigError
from megatron_switch.flags.argv import attribute_of

FLAGS_FILE = Path(__file__).parent / "train_flags.json"
SWITCH_GROUP = "Switch Transformer"
"""Title of our own flags."""

_TYPES = {"int": int, "float": float}


@cache
def _groups() -> dict[str, dict[str, dict[str, Any]]]:
    groups: dict[str, dict[str, dict[str, Any]]]
    groups = json.loads(FLAGS_FILE.read_text(encoding="utf-8"))
    return groups


@cache
def flag_names() -> frozenset[str]:
    """Return all names, without the leading dashes."""
    return frozenset(
        name.removeprefix("--")
        for flags in _groups().values()
        for flag, options in flags.items()
        for name in (flag, *options.get("also", ()))
    )


def add_group(parser: _ActionsContainer, title: str) -> None:
    """Add one group of flags to a parser, for its help text."""
    group = parser.add_argument_group(title)
    for flag in _groups()[title]:
        add_flag(group, flag)


def add_flag(parser: _ActionsContainer, flag: str, **changes: Any) -> None:
    """Add a flag to a parser as the trainer has it.

    Args:
        parser: Parser or group.
        flag: With the leading dashes.
        changes: Arguments of ``add_argument`` to replace.
    """
    options = {**_options(flag), **changes}
    also = options.pop("also", ())
    if "type" in options:
        options["type"] = _TYPES[options["type"]]
    parser.add_argument(flag, *also, **options)


def destination(flag: str) -> str:
    """Return the attribute of the trainer's arguments that a flag sets."""
    name: str = _options(flag).get("dest", attribute_of(flag))
    return name


def _options(flag: str) -> dict[str, Any]:
    return next(flags[flag] for flags in _groups().values() if flag in flags)


def refuse_unknown(argv: Sequence[str]) -> None:
    """Refuse a word of a command line that looks like a flag and is none.

    Args:
        argv: Flags of a training and their values.

    Raises:
        ConfigError: With the nearest names that there are.
    """
    for word in argv:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name not in flag_names():
            raise ConfigError(f"There is no flag --{name}.{suggestion(name)}")


def suggestion(name: str) -> str:
    """Return as the end of a message which flags a name without dashes may have meant."""
    close = difflib.get_close_matches(name, flag_names(), n=3, cutoff=0.7)
    if not close:
        return " See docs/flags.md for the list."
    return f" Did you mean {' or '.join(f'--{each}' for each in close)}?"
