"""Sizes as they were given: what follows from what."""

import pytest

from megatron_switch.layout.sizes import Sizes, divisors


def test_expert_tensor_parallelism_follows_tensor_parallelism_unless_given():
    assert Sizes(16, tp=2).changed(tp=4).etp == 4
    assert Sizes(16, tp=2, etp=2).changed(tp=4).etp == 2


@pytest.mark.parametrize(("number", "expected"), [(1, [1]), (7, [1, 7]), (12, [1, 2, 3, 4, 6, 12])])
def test_divisors_are_ascending(number, expected):
    assert divisors(number) == expected
