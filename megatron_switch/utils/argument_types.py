"""Values that several commands take, as types for argparse."""

import math
import os
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


def tokens(text: str) -> int:
    """Return a number of tokens: 300000000000, 300e9, 300B or 0.3T."""
    unit = _UNITS.get(text[-1:], 1)
    try:
        value = float(text if unit == 1 else text[:-1]) * unit
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise ArgumentTypeError(f"takes a number of tokens, such as 300e9 or 300B, got '{text}'")
    return round(value)


_UNITS = {"M": 10**6, "B": 10**9, "T": 10**12}


def output_file(text: str) -> Path:
    """Return the path of a file that can be written; what is there before is not touched."""
    target = path(text)
    if target.is_dir():
        raise ArgumentTypeError(f"takes a file, and '{text}' is a folder")
    folder = target.parent
    if not folder.is_dir():
        raise ArgumentTypeError(f"is in the folder '{folder}', which does not exist: create it")
    if not os.access(folder, os.W_OK):
        raise ArgumentTypeError(f"is in the folder '{folder}', which cannot be written")
    return target
