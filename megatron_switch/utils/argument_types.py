"""Values that several commands take, as types for argparse."""

import math
from argparse import ArgumentTypeError
from pathlib import Path

_MOST = 2**20  # more than there are in any cluster; beyond, answers would take minutes


def count(text: str) -> int:
    """Return a number of nodes, ranks and the like."""
    if not text.isdecimal() or not 1 <= int(text) <= _MOST:
        raise ArgumentTypeError(f"takes a whole number from 1 to {_MOST}, got '{text}'")
    return int(text)


def not_negative(text: str) -> float:
    """Return a number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"takes a number, 0 or more, got '{text}'")
    return value


def path(text: str) -> Path:
    """Return a path; an empty word, as an unset variable leaves it, would be this folder."""
    if not text:
        raise ArgumentTypeError("takes a path, got an empty word")
    return Path(text)
