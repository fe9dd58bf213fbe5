"""Words of a command line that carries the flags of a training after ``--``."""

from collections.abc import Sequence


def count(text: str) -> int:
    """Return a whole number of at least 1; argparse turns the ValueError into its message."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def split_at_dashes(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first ``--``, and those after it."""
    words = list(argv)
    if "--" not in words:
        return words, []
    place = words.index("--")
    return words[:place], words[place + 1 :]
