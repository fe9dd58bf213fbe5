"""Every pair of values that can meet does, whatever is given and whatever is not allowed."""

from itertools import product

import pytest

from megatron_switch.testing.covering_array import covering_subset, pairs_of, spread

FACTORS = {"colour": ("red", "green", "blue"), "size": (1, 2), "shape": ("round", "square", "flat")}
GIVEN = [{"row": number, "kind": number % 3} for number in range(40)]


def pairs(rows):
    return {pair for row in rows for pair in pairs_of(row)}


def all_pairs(factors):
    return pairs(dict(zip(factors, values, strict=True)) for values in product(*factors.values()))


def test_a_row_of_three_values_makes_three_pairs():
    found = set(pairs_of({"a": 1, "b": 2, "c": 3}))
    expected = [("a", 1, "b", 2), ("a", 1, "c", 3), ("b", 2, "c", 3)]
    assert found == {frozenset(((p, x), (q, y))) for p, x, q, y in expected}


def test_spread_rows_make_every_pair_of_chosen_and_given_values():
    rows = spread(GIVEN, FACTORS)
    wanted = all_pairs(FACTORS | {"kind": (0, 1, 2)})
    assert wanted <= pairs(rows)


def test_spread_keeps_the_given_rows_and_their_order():
    rows = spread(GIVEN, FACTORS)
    assert [{name: row[name] for name in ("row", "kind")} for row in rows] == GIVEN
    assert all(row.keys() == {"row", "kind", *FACTORS} for row in rows)


def test_spread_is_the_same_each_time():
    assert spread(GIVEN, FACTORS) == spread(GIVEN, FACTORS)


def test_values_stay_spread_when_every_pair_is_made():
    rows = spread([{}] * 300, FACTORS)
    for factor, values in FACTORS.items():
        counts = [sum(row[factor] == value for row in rows) for value in values]
        assert max(counts) - min(counts) <= 10, (factor, counts)


def test_what_is_not_allowed_never_comes_and_all_else_does():
    def allowed(row):
        return not (row["kind"] == 1 and row.get("colour") == "red")

    rows = spread(GIVEN, FACTORS, allowed=allowed)
    assert all(map(allowed, rows))
    forbidden = {frozenset((("kind", 1), ("colour", "red")))}
    assert all_pairs(FACTORS | {"kind": (0, 1, 2)}) - forbidden <= pairs(rows)


def test_a_row_without_a_possible_value_is_named():
    with pytest.raises(AssertionError, match=r"no value of colour is possible with \{'row': 0"):
        spread(GIVEN, FACTORS, allowed=lambda row: "colour" not in row)


def test_a_subset_makes_every_pair_with_fewer_rows():
    names = list(FACTORS)
    rows = [dict(zip(names, values, strict=True)) for values in product(*FACTORS.values())]
    chosen = covering_subset(rows)
    assert chosen == sorted(chosen)
    assert pairs(rows[index] for index in chosen) == pairs(rows)
    assert 9 <= len(chosen) <= 11  # of 18; nine pairs of colour and shape need as many rows
