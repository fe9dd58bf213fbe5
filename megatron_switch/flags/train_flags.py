"""The names of all flags of ``megatron-switch train``, known without importing Megatron.

A planner on a login node, or a script that is rendered there, must not take a misspelt flag for one
that has nothing to do with sizes. The names stand in ``train_flags.json``, which
``tools/make_flags_doc.py`` writes and a test compares with the parser that trains.
"""

import difflib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from megatron_switch.errors import ConfigError

NAMES_FILE = Path(__file__).parent / "train_flags.json"


@cache
def flag_names() -> frozenset[str]:
    """Return all names, without the leading dashes."""
    return frozenset(json.loads(NAMES_FILE.read_text(encoding="utf-8")))


def refuse_unknown(words: Sequence[str]) -> None:
    """Refuse a word of a command line that looks like a flag and is none.

    Args:
        words: Flags of a training and their values.

    Raises:
        ConfigError: With the nearest names that there are.
    """
    for word in words:
        name = word.removeprefix("--").partition("=")[0]
        if word.startswith("--") and name not in flag_names():
            raise ConfigError(f"There is no flag --{name}.{suggestion(name)}")


def suggestion(name: str) -> str:
    """Return as the end of a message which flags a name without dashes may have meant."""
    close = difflib.get_close_matches(name, flag_names(), n=3, cutoff=0.7)
    if not close:
        return " See docs/flags.md for the list."
    return f" Did you mean {' or '.join(f'--{each}' for each in close)}?"
