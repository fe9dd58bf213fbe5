"""Words of a command line that carries the flags of a training after ``--``."""

from argparse import ArgumentTypeError
from collections.abc import Sequence

_MOST = 2**20  # more than there are in any cluster; beyond, answers would take minutes


def count(text: str) -> int:
    """Return a number of nodes, ranks and the like, for argparse."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise ArgumentTypeError(f"takes a whole number from 1 to {_MOST}, got '{text}'")
    return int(text)


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and those after it."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]
