"""Pairwise covering: spread settings over rows so that every pair of values meets in some row.

Most faults of a configurable system need two settings at once, not one and not five, so a table in
which every two values of any two factors meet finds them at a fraction of the product's size.

Some factors are given: every row comes with its own values of them, and all rows are kept
(:func:`spread`). The others are chosen, greedily and without randomness: row by row and factor by
factor, each takes the value that makes the most new pairs, and among those the one whose pairs are
rarest so far, so that values stay spread when every pair has been made. :func:`covering_subset`
picks rows that make all pairs which some row makes.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations

Row = Mapping[str, object]
"""Values by the name of their factor."""

Pair = frozenset[tuple[str, object]]
"""Two factors with their values (one, where a value is counted by itself)."""


def spread(
    rows: Sequence[Row],
    factors: Mapping[str, Sequence[object]],
    *,
    allowed: Callable[[Row], bool] = lambda row: True,
) -> list[dict[str, object]]:
    """Complete every row with values of ``factors``, so that pairs of values are covered.

    Args:
        rows: Given values; all rows have the same factors.
        factors: The other factors, each with its values, in the order in which they are chosen.
        allowed: Whether a row, complete so far, is possible. A value that it allows never leaves a
            later factor without one.

    Returns:
        The complete rows, in the order of ``rows``.
    """
    made: Counter[Pair] = Counter()
    complete = []
    for given in rows:
        row = dict(given)
        for factor, values in factors.items():
            possible = [value for value in values if allowed({**row, factor: value})]
            assert possible, f"no value of {factor} is possible with {row}"
            pairs = {value: _pairs_with(row, factor, value) for value in possible}
            row[factor] = min(possible, key=lambda value: _rarity(pairs[value], made))
            made.update(pairs[row[factor]])
        complete.append(row)
    return complete


def covering_subset(rows: Sequence[Row]) -> list[int]:
    """Return the indices, ascending, of rows that together make every pair that any row makes."""
    pairs = [frozenset(pairs_of(row)) for row in rows]
    missing: set[Pair] = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(pairs[index] & missing))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def pairs_of(row: Row) -> Iterator[Pair]:
    """Yield every pair of values of a row."""
    return map(frozenset, combinations(row.items(), 2))


def _pairs_with(row: Row, factor: str, value: object) -> list[Pair]:
    """Return the pairs that a value makes in a row, and the value itself, which is to come too."""
    here = (factor, value)
    return [frozenset((here,)), *(frozenset((item, here)) for item in row.items())]


def _rarity(pairs: Sequence[Pair], made: Counter[Pair]) -> tuple[int, int]:
    """Return a key that is least for the pairs to make next."""
    counts = [made[pair] for pair in pairs]
    return -counts.count(0), sum(counts)
