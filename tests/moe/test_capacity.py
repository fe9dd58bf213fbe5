"""Capacity is exact, and its roundings are those of the systems they are named after."""

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_switch.errors import ConfigError
from megatron_switch.moe.capacity import expert_capacity


@pytest.mark.parametrize(
    ("tokens", "experts", "factor", "floor", "half_even", "ceil"),
    [
        (9, 2, 1.0, 4, 4, 5),  # 4.5
        (11, 2, 1.0, 5, 6, 6),  # 5.5
        (10, 4, 1.4, 3, 4, 4),  # 3.5
        (1000, 7, 0.07, 10, 10, 10),  # 10.000000000000002 in floats
        (100, 3, 0.29, 9, 10, 10),  # 9.666...
        (300, 3, 0.29, 29, 29, 29),  # 28.999999999999996 in floats
        (8, 8, 1, 1, 1, 1),
    ],
)
def test_slots_are_rounded_exactly(tokens, experts, factor, floor, half_even, ceil):
    results = [
        expert_capacity(tokens, experts, factor, min_capacity=0, rounding=rounding)
        for rounding in ("floor", "round", "ceil")
    ]
    assert results == [floor, half_even, ceil]


def test_the_default_is_mesh_tensorflow():
    assert expert_capacity(1024, 128, 1.25) == 10  # floor
    assert expert_capacity(10, 4, 1.0) == 4  # least capacity 4, where floor gives 2


@pytest.mark.parametrize(
    ("tokens", "factor", "min_capacity", "expected"),
    [
        (10, 100.0, 0, 10),  # never more slots than tokens ...
        (2, 1.0, 4, 4),  # ... except for the least capacity
        (10, 0.1, 0, 0),
        (0, 1.25, 0, 0),
        (0, 1.25, 4, 4),
    ],
)
def test_slots_lie_between_least_capacity_and_tokens(tokens, factor, min_capacity, expected):
    assert expert_capacity(tokens, 4, factor, min_capacity=min_capacity) == expected


@pytest.mark.parametrize("tokens", [0, 1, 37])
def test_a_negative_factor_drops_nothing(tokens):
    assert expert_capacity(tokens, 8, -1.0, min_capacity=4) == tokens


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 10**7),
    experts=st.integers(1, 4096),
    hundredths=st.integers(1, 1000),
    min_capacity=st.integers(0, 8),
)
def test_roundings_are_exact_for_every_decimal(tokens, experts, hundredths, min_capacity):
    exact = Fraction(tokens * hundredths, 100 * experts)
    for rounding, function in (("floor", math.floor), ("round", round), ("ceil", math.ceil)):
        result = expert_capacity(
            tokens, experts, hundredths / 100, min_capacity=min_capacity, rounding=rounding
        )
        assert result == max(min(tokens, function(exact)), min_capacity)


@pytest.mark.parametrize("factor", [0, 0.0, math.inf, -math.inf, math.nan])
def test_a_factor_that_means_nothing_names_the_flags(factor):
    with pytest.raises(
        ConfigError, match=r"--moe-expert-capacity-factor .* negative one to drop no"
    ):
        expert_capacity(10, 4, factor)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((-1, 4, 1.0), {}, r"got -1 tokens and 4 experts\. Check --num-experts"),
        ((8, 0, 1.0), {}, r"got 8 tokens and 0 experts\. Check --num-experts"),
        ((8, 4, 1.0), {"min_capacity": -2}, r"--switch-min-capacity must be at least 0, got -2"),
        ((8, 4, 1.0), {"rounding": "up"}, r"--switch-capacity-rounding .*'ceil'\], got 'up'"),
    ],
)
def test_bad_input_is_named(arguments, options, message):
    with pytest.raises(ConfigError, match=message):
        expert_capacity(*arguments, **options)
